"""Where the bytes of each method's peak go, in tables and sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.reports.doubt import explain, marked
from dpscope.reports.memory.data import (
    Composition,
    described_of,
    is_private_only,
    label_of,
    present,
    snapshots_of,
    standard_of,
    undescribed,
)
from dpscope.reports.tables import SPEEDS, Row, group_by_size
from dpscope.reports.words import shorten
from dpscope.results.payloads.memory import OTHER_MODULES
from dpscope.units import MIB, MISSING, format_bytes, format_ms, format_ratio, format_throughput, mib
from dpscope.vocabulary.components import ACTIVATION_HOOKS, ACTIVATIONS, UNATTRIBUTED
from dpscope.vocabulary.methods import STANDARD

LABELS = 24  # characters of the first column
LONGEST_HEADING = 20  # of a method, as a heading
HEAVIEST = 3  # modules named for each method
SAVED = (ACTIVATIONS, ACTIVATION_HOOKS)  # what a module keeps for the backward pass
TRIFLE = 0.01  # of standard's peak: differences below this are summed up as the rest


def by_size(
    rows: Sequence[Row], heading: str, describe: Callable[[Sequence[Row]], list[RenderableType]]
) -> list[RenderableType]:
    """Under a heading, what there is to say of each size; nothing of sizes without figures."""
    parts: list[RenderableType] = []
    for group in group_by_size(rows):
        if told := describe(group):
            title = Text(f"{heading}: {group[0].size}", style="bold")
            parts += [*([""] if parts else []), title, "", *told]
    return parts


def memory_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """For each size: components by method, what private training adds, who makes the peak."""
    return by_size(rows, "Memory at the peak", partial(_at_peak, width=width))


def snapshot_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """For each size: what was allocated at every stage of the run."""
    return by_size(rows, "Allocated at each stage", partial(_at_stages, width=width))


def _at_peak(rows: Sequence[Row], width: int) -> list[RenderableType]:
    described = described_of(rows)
    if not described:
        return []
    parts = [*_by_component(described, width), "", *map(Text, extra_in_words(described))]
    if any(each.maker or each.modules for each in described.values()):
        parts += ["", _makers(described)]
    parts += ["", *(Text(note, style="dim") for note in _notes(described))]
    if missing := [f"{row.method} ({reason})" for row, reason in undescribed(rows)]:
        parts.append(Text(f"Not broken down: {', '.join(missing)}", style="yellow"))
    return parts


def _at_stages(rows: Sequence[Row], width: int) -> list[RenderableType]:
    stages = {row: found for row in rows if (found := snapshots_of(row))}
    names = dict.fromkeys(name for taken in sorted(stages.values(), key=len, reverse=True) for name in taken)
    lines = [(name, [format_bytes(taken.get(name)) for taken in stages.values()]) for name in names]
    return _tables("stage", [row.method for row in stages], lines, width)


def _by_component(described: Mapping[Row, Composition], width: int) -> list[RenderableType]:
    """A line a component and a column a method; the totals, times and ratios below."""
    rows, compositions = list(described), list(described.values())
    lines = [
        (
            label_of(key) + (" *" if is_private_only(key) else ""),
            [format_bytes(each.components.get(key) or None) for each in compositions],
        )
        for key in present(each.components for each in compositions)
    ]
    lines.append(("total", [format_bytes(each.total) for each in compositions]))
    if (standard := standard_of(described)) and standard.total > 0:
        lines.append(("  × standard", [format_ratio(each.total / standard.total) for each in compositions]))
    if any(row.median_ms for row in rows):
        lines.append(("time/step", [marked(format_ms(row.median_ms), row.time_doubt) for row in rows]))
        lines.append(("  × standard", [marked(format_ratio(row.time_ratio), row.ratio_doubt) for row in rows]))
        for name, rate in SPEEDS.items():
            if any(rate(row) is not None for row in rows):
                lines.append((name, [marked(format_throughput(rate(row)), row.time_doubt) for row in rows]))
        lines.append(("memory/time", [_memory_per_time(*each) for each in described.items()]))
    return _tables("component", [row.method for row in rows], lines, width)


def _memory_per_time(row: Row, composition: Composition) -> str:
    return marked(f"{mib(composition.total) / row.median_ms:.2f} MiB/ms", row.time_doubt) if row.median_ms else MISSING


def _tables(
    first: str, methods: Sequence[str], lines: Sequence[tuple[str, Sequence[str]]], width: int
) -> list[RenderableType]:
    """One table, or as many below each other as the width asks for."""
    names = [shorten(method, LONGEST_HEADING) for method in methods]
    widths = [max(len(name), *(len(cells[n]) for _, cells in lines)) + 2 for n, name in enumerate(names)]
    tables: list[RenderableType] = []
    start = 0
    while start < len(names):
        end, room = start + 1, width - LABELS - widths[start]
        while end < len(names) and widths[end] <= room:
            room -= widths[end]
            end += 1
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column(first, no_wrap=True, min_width=min(LABELS, width // 2))
        for name in names[start:end]:
            table.add_column(name, justify="right", no_wrap=True)
        for label, cells in lines:
            table.add_row(Text(label, style="bold" if label == "total" else ""), *cells[start:end])
        tables += [*([""] if tables else []), table]
        start = end
    return tables


def extra_in_words(described: Mapping[Row, Composition]) -> list[str]:
    """`ghost holds 4.20 GiB more than standard at the peak: temporary matrices +4.00 GiB, …`, a sentence a method."""
    standard = standard_of(described)
    if standard is None:
        return ["No standard at this size to compare with: measure it with --methods standard,…"]
    return [
        f"{row.method} holds {_compared(composition.extra_over(standard), standard)}"
        for row, composition in described.items()
        if row.method != STANDARD
    ]


def _compared(extra: Mapping[str, float], standard: Composition) -> str:
    """The net of what a method holds beyond standard, and its larger parts, the largest first."""
    net = sum(extra.values())
    told = {key: count for key, count in extra.items() if abs(count) >= TRIFLE * standard.total}
    parts = [f"{label_of(key)} {signed(told[key])}" for key in sorted(told, key=lambda key: -abs(told[key]))]
    rest = net - sum(told.values())
    parts += [f"the rest {signed(rest)}"] if told and abs(rest) >= MIB / 10 else []
    amount = f"{format_bytes(abs(net))} {'more' if net >= 0 else 'less'} than" if round(net) else "as much as"
    return f"{amount} standard at the peak" + (f": {', '.join(parts)}." if parts else ".")


def signed(count: float) -> str:
    return ("+" if count >= 0 else "−") + format_bytes(abs(count))


def _makers(described: Mapping[Row, Composition]) -> Table:
    """Who reaches the peak, and which modules hold the most then."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("method", "the peak is reached in", "heaviest activations"):
        table.add_column(heading, overflow="fold")
    for row, composition in described.items():
        held = [(module, sum(components.get(key, 0) for key in SAVED)) for module, components in composition.modules]
        named = [(module, count) for module, count in held if count > 0 and module != OTHER_MODULES]
        heaviest = sorted(named, key=lambda entry: -entry[1])[:HEAVIEST]
        modules = ", ".join(f"{shorten(module, 40)} {format_bytes(count)}" for module, count in heaviest)
        maker = shorten(composition.maker or MISSING, 64)
        table.add_row(*map(Text, (shorten(row.method, LONGEST_HEADING), maker, modules or MISSING)))
    return table


def _notes(described: Mapping[Row, Composition]) -> list[str]:
    components = present(each.components for each in described.values())
    notes = ["* only private training holds this."] if any(map(is_private_only, components)) else []
    if any(row.median_ms for row in described):
        notes.append("memory/time: MiB at the peak for each millisecond of a step.")
        notes += [note] if (note := explain(row.ratio_doubt for row in described)) else []
    if UNATTRIBUTED in components:
        notes.append(f"Unattributed (the allocator's peak less all that was tracked): {_explained(described)}.")
    return notes


def _explained(described: Mapping[Row, Composition]) -> str:
    """What is known of each method's unattributed bytes; methods that share an explanation stand together."""
    reasons: dict[str, list[str]] = {}
    for row, composition in described.items():
        if count := composition.components.get(UNATTRIBUTED):
            known = ", ".join(f"{part['what']} {format_bytes(part['bytes'])}" for part in composition.unattributed)
            reasons.setdefault(format_bytes(count) + (f" ({known})" if known else ""), []).append(row.method)
    return "; ".join(f"{', '.join(methods)}: {reason}" for reason, methods in reasons.items())
