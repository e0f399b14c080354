"""Where the bytes of each method's peak go, in tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.reports.doubt import explain, marked
from dpscope.reports.memory.data import (
    Composition,
    composition_of,
    in_order,
    is_private_only,
    label_of,
    snapshots_of,
    why_no_composition,
)
from dpscope.reports.tables import RATES, STANDARD, Row, group_by_size
from dpscope.reports.words import shorten, size_in_words
from dpscope.units import MISSING, format_bytes, format_ms, format_ratio, format_throughput, mib
from dpscope.vocabulary.components import ACTIVATION_HOOKS, ACTIVATIONS, UNATTRIBUTED

LABELS = 24  # characters of the first column
LONGEST_NAME = 20  # of a method, as a heading
HEAVIEST = 3  # modules named for each method
OTHERS = "(other)"  # all modules that are too light to be listed, together
HELD = (ACTIVATIONS, ACTIVATION_HOOKS)  # what a module keeps for the backward pass
TRIFLE = 0.01  # of standard's peak: differences below this are summed up as the rest

Described = tuple[Row, Composition]


def memory_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """For each size: components by method, what private training adds, who makes the peak."""
    parts: list[RenderableType] = []
    for group in group_by_size(rows):
        found = [(row, composition_of(row)) for row in group]
        if described := [(row, composition) for row, composition in found if composition]:
            heading = f"Memory at the peak: {size_in_words(group[0].first.spec)}"
            parts += [*([""] if parts else []), Text(heading, style="bold"), ""]
            parts += _by_component(described, width)
            parts += ["", *(Text(sentence) for sentence in extra_in_words(described))]
            parts += ["", _makers(described)] if any(each.maker or each.modules for _, each in described) else []
            parts += ["", *(Text(note, style="dim") for note in _notes(described))]
            missing = [f"{row.method} ({why_no_composition(row)})" for row, composition in found if not composition]
            parts += [Text(f"Not broken down: {', '.join(missing)}", style="yellow")] if missing else []
    return parts


def snapshot_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """For each size: what was allocated at every stage of the run."""
    parts: list[RenderableType] = []
    for group in group_by_size(rows):
        stages = [(row.method, dict(snapshots_of(row))) for row in group if snapshots_of(row)]
        if stages:
            longest = sorted((list(allocated) for _, allocated in stages), key=len, reverse=True)
            names = dict.fromkeys(name for listed in longest for name in listed)
            lines = [(name, [format_bytes(allocated.get(name)) for _, allocated in stages]) for name in names]
            heading = f"Allocated at each stage: {size_in_words(group[0].first.spec)}"
            parts += [*([""] if parts else []), Text(heading, style="bold"), ""]
            parts += _tables("stage", [method for method, _ in stages], lines, width)
    return parts


def _by_component(described: Sequence[Described], width: int) -> list[RenderableType]:
    """A line a component and a column a method; the totals, times and ratios below."""
    rows, compositions = zip(*described, strict=True)
    present = in_order(key for each in compositions for key, count in each.components.items() if count)
    lines = [
        (
            label_of(key) + (" *" if is_private_only(key) else ""),
            [format_bytes(count) if (count := each.components.get(key)) else MISSING for each in compositions],
        )
        for key in present
    ]
    lines.append(("total", [format_bytes(each.total) for each in compositions]))
    standard = next((composition for row, composition in described if row.method == STANDARD), None)
    if standard and standard.total > 0:
        lines.append(("  × standard", [format_ratio(each.total / standard.total) for each in compositions]))
    if any(row.median_ms for row in rows):
        lines.append(("time/step", [marked(format_ms(row.median_ms), row.time_doubt) for row in rows]))
        lines.append(("  × standard", [marked(format_ratio(row.time_ratio), row.ratio_doubt) for row in rows]))
        for name, rate in RATES.items():
            if any(rate(row) is not None for row in rows):
                lines.append((name, [marked(format_throughput(rate(row)), row.time_doubt) for row in rows]))
        lines.append(("memory/time", [_memory_per_time(row, each) for row, each in described]))
    return _tables("component", [row.method for row in rows], lines, width)


def _memory_per_time(row: Row, composition: Composition) -> str:
    return marked(f"{mib(composition.total) / row.median_ms:.2f} MiB/ms", row.time_doubt) if row.median_ms else MISSING


def _tables(
    first: str, methods: Sequence[str], lines: Sequence[tuple[str, Sequence[str]]], width: int
) -> list[RenderableType]:
    """One table, or as many below each other as the width asks for."""
    names = [shorten(method, LONGEST_NAME) for method in methods]
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


def extra_in_words(described: Sequence[Described]) -> list[str]:
    """`ghost holds 4.20 GiB more than standard at the peak: temporary matrices +4.00 GiB, …`, a sentence a method."""
    standard = next((composition for row, composition in described if row.method == STANDARD), None)
    if standard is None:
        return ["No standard at this size to compare with: measure it with --methods standard,…"]
    sentences = []
    for row, composition in described:
        if row.method == STANDARD:
            continue
        extra = composition.extra_over(standard)
        net = sum(extra.values())
        told = sorted(
            ((key, count) for key, count in extra.items() if abs(count) >= TRIFLE * standard.total),
            key=lambda entry: -abs(entry[1]),
        )
        parts = [f"{label_of(key)} {signed(count)}" for key, count in told]
        rest = net - sum(count for _, count in told)
        parts += [f"the rest {signed(rest)}"] if told and abs(rest) >= 2**20 / 10 else []
        amount = f"{format_bytes(abs(net))} {'more' if net >= 0 else 'less'} than" if round(net) else "as much as"
        sentences.append(
            f"{row.method} holds {amount} standard at the peak" + (f": {', '.join(parts)}." if parts else ".")
        )
    return sentences


def signed(count: float) -> str:
    return ("+" if count >= 0 else "−") + format_bytes(abs(count))


def _makers(described: Sequence[Described]) -> Table:
    """Who reaches the peak, and which modules hold the most then."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("method", "the peak is reached in", "heaviest activations"):
        table.add_column(heading, overflow="fold")
    for row, composition in described:
        held = [(module, sum(components.get(key, 0.0) for key in HELD)) for module, components in composition.modules]
        named = [(module, count) for module, count in held if count > 0 and module != OTHERS]
        heaviest = sorted(named, key=lambda entry: -entry[1])[:HEAVIEST]
        modules = ", ".join(f"{shorten(module, 40)} {format_bytes(count)}" for module, count in heaviest)
        maker = shorten(composition.maker or MISSING, 64)
        table.add_row(*map(Text, (shorten(row.method, LONGEST_NAME), maker, modules or MISSING)))
    return table


def _notes(described: Sequence[Described]) -> list[str]:
    components = [key for _, composition in described for key, count in composition.components.items() if count]
    notes = ["* only private training holds this."] if any(map(is_private_only, components)) else []
    if any(row.median_ms for row, _ in described):
        notes.append("memory/time: MiB at the peak for each millisecond of a step.")
        notes += [note] if (note := explain(row.ratio_doubt for row, _ in described)) else []
    if UNATTRIBUTED in components:
        notes.append(f"Unattributed (the allocator's peak less all that was tracked): {_explained(described)}.")
    return notes


def _explained(described: Sequence[Described]) -> str:
    """What is known of each method's unattributed bytes; methods that share an explanation stand together."""
    reasons: dict[str, list[str]] = {}
    for row, composition in described:
        if count := composition.components.get(UNATTRIBUTED):
            known = ", ".join(f"{what} {format_bytes(part)}" for what, part in composition.unattributed)
            reasons.setdefault(format_bytes(count) + (f" ({known})" if known else ""), []).append(row.method)
    return "; ".join(f"{', '.join(methods)}: {reason}" for reason, methods in reasons.items())
