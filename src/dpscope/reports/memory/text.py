"""Memory of rows: what the bytes of a peak were for, in tables and sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.plain_text import bare_table
from dpscope.reports.looks import in_longest_order, shorten
from dpscope.reports.tables import SPEEDS, Row, explain, group_by_size, marked, once_a_row
from dpscope.results import derived
from dpscope.results.payloads.memory import OTHER_MODULES, TensorsAtPeak
from dpscope.units import MIB, MISSING, format_bytes, format_ratio, mib
from dpscope.vocabulary.components import ACTIVATION_HOOKS, ACTIVATIONS, UNATTRIBUTED, component_named, in_order
from dpscope.vocabulary.methods import STANDARD


def present(held: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the components that hold anything, in the order of stacking."""
    return in_order(key for each in held for key, count in each.items() if count)


@once_a_row
def composition_of(row: Row) -> derived.Composition | None:
    """Return what the peak was made of; None if no instrument saw it."""
    return row.first_of(derived.composition_in)


def described_of(rows: Iterable[Row]) -> dict[Row, derived.Composition]:
    """Return the rows whose peaks have a composition."""
    return {row: composition for row in rows if (composition := composition_of(row))}


def undescribed(rows: Iterable[Row]) -> list[tuple[Row, str]]:
    """Return the others, and why they have none."""
    return [(row, row.why_none("no breakdown by component was measured")) for row in rows if not composition_of(row)]


def standard_of(described: Mapping[Row, derived.Composition]) -> derived.Composition | None:
    return next((composition for row, composition in described.items() if row.method == STANDARD), None)


@once_a_row
def timeline_of(row: Row) -> derived.Timeline | None:
    """Return the timeline of a row; None if there is none that can be drawn."""
    return row.first_of(lambda result: derived.timeline_in(result.timeline))


def snapshots_of(row: Row) -> dict[str, float]:
    """Return the named stages of a run and the bytes that were allocated at each."""
    taken = row.first_of(lambda result: result.snapshots) or []
    return {stage["name"]: stage["allocated_mb"] * MIB for stage in taken}


def tensors_of(row: Row) -> TensorsAtPeak | None:
    """Return the tensors at the peak; None if the file has none, as in older versions."""
    tensors = row.first_of(lambda result: result.memory.get("tensors"))
    return tensors if tensors and tensors["largest"] else None


LABELS = 24  # characters of the first column
LONGEST_HEADING = 20  # of a method
HEAVIEST = 3  # modules named for each method
SAVED = (ACTIVATIONS, ACTIVATION_HOOKS)  # what a module keeps for the backward pass
TRIFLE = 0.01  # of standard's peak: differences below this are summed up as the rest
SHOWN_TENSORS = 4  # of each method in the text; the page and the result file have more
TENSOR_NOTE = (
    "line: the innermost line of Python outside torch that asked for it; backward: autograd made it for that line. "
    "The page and the result files name folders and functions too."
)


def _by_size(
    rows: Sequence[Row], heading: str, describe: Callable[[Sequence[Row]], list[RenderableType]]
) -> list[RenderableType]:
    """Return the text of each size under a heading; nothing for sizes without figures."""
    told = [(group[0].where, parts) for group in group_by_size(rows) if (parts := describe(group))]
    headed = [["", Text(f"{heading}: {size}", style="bold"), "", *parts] for size, parts in told]
    return [part for parts in headed for part in parts][1:]


def memory_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    return _by_size(rows, "Memory at the peak", partial(_at_peak, width=width))


def snapshot_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    return _by_size(rows, "Allocated at each stage", partial(_at_stages, width=width))


def tensor_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """Return for each size the largest tensors at each method's peak: shape, use, and the line that made them."""
    parts = _by_size(rows, "Largest tensors at the peak", _largest_tensors)
    return [*parts, "", Text(TENSOR_NOTE, style="dim")] if parts else []


def _at_peak(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """Return the components by method, what private training adds, and what makes the peak."""
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
    names = in_longest_order(stages.values())
    lines = [(name, [format_bytes(taken.get(name)) for taken in stages.values()]) for name in names]
    return _tables("stage", list(stages), lines, width)


def _by_component(described: Mapping[Row, derived.Composition], width: int) -> list[RenderableType]:
    """Return a line for each component and a column for each method, with totals, times and ratios below."""
    rows, compositions = list(described), list(described.values())
    standard = standard_of(described)
    lines = [
        (component_named(key).marked(" *"), [format_bytes(each.components.get(key) or None) for each in compositions])
        for key in present(each.components for each in compositions)
    ]
    lines.append(("total", [format_bytes(each.total) for each in compositions]))
    if standard and standard.total > 0:
        lines.append(("  × standard", [format_ratio(each.ratio_to(standard)) for each in compositions]))
    if any(row.median_ms for row in rows):
        known = [name for name in SPEEDS if any(name in row.speeds for row in rows)]
        both = [(mib(each.total), row.median_ms) for row, each in described.items()]
        for_time = [f"{held / ms:.2f} MiB/ms" if ms else MISSING for held, ms in both]
        lines += [
            ("time/step", [row.time_shown for row in rows]),
            ("  × standard", [row.time_ratio_shown for row in rows]),
            *((name, [row.speed_shown(name) for row in rows]) for name in known),
            ("memory/time", [marked(each, row.time_doubt) for row, each in zip(rows, for_time, strict=True)]),
        ]
    return _tables("component", rows, lines, width)


def _tables(
    first: str, rows: Sequence[Row], lines: Sequence[tuple[str, Sequence[str]]], width: int
) -> list[RenderableType]:
    """Return one table with a column for each method, split into several if the width is too small."""
    names = [shorten(row.method, LONGEST_HEADING) for row in rows]
    widths = [max(len(name), *(len(cells[n]) for _, cells in lines)) + 2 for n, name in enumerate(names)]
    tables: list[RenderableType] = []
    end = 0
    while (start := end) < len(names):
        end += 1
        while end < len(names) and sum(widths[start : end + 1]) <= width - LABELS:
            end += 1
        table = bare_table(first, *names[start:end], least={first: min(LABELS, width // 2)})
        for label, cells in lines:
            table.add_row(Text(label, style="bold" if label == "total" else ""), *cells[start:end])
        tables += ["", table]
    return tables[1:]


def extra_in_words(described: Mapping[Row, derived.Composition]) -> list[str]:
    """Return `ghost holds 4.20 GiB more than standard at the peak: temporary matrices +4.00 GiB, …` by method."""
    standard = standard_of(described)
    if standard is None:
        return ["No standard at this size to compare with: measure it with --methods standard,…"]
    sentences = []
    for row, composition in described.items():
        extra = composition.extra_over(standard)
        net = sum(extra.values())
        told = {key: count for key, count in extra.items() if abs(count) >= TRIFLE * standard.total}
        parts = [
            f"{component_named(key).label} {signed(told[key])}" for key in sorted(told, key=lambda key: -abs(told[key]))
        ]
        rest = net - sum(told.values())
        parts += [f"the rest {signed(rest)}"] if told and abs(rest) >= MIB / 10 else []
        amount = f"{format_bytes(abs(net))} {'more' if net >= 0 else 'less'} than" if round(net) else "as much as"
        which = f": {', '.join(parts)}." if parts else "."
        sentences += [f"{row.method} holds {amount} standard at the peak{which}"] if row.method != STANDARD else []
    return sentences


def signed(count: float) -> str:
    return ("+" if count >= 0 else "−") + format_bytes(abs(count))


def _makers(described: Mapping[Row, derived.Composition]) -> Table:
    """Return a table of the operators that reach the peak, and the modules that hold most at that moment."""
    headings = ("method", "the peak is reached in", "heaviest activations")
    table = bare_table(*headings, left=headings, wrap=headings)
    for row, composition in described.items():
        held = {module: sum(counts.get(key, 0) for key in SAVED) for module, counts in composition.modules}
        heaviest = sorted((m for m in held if held[m] > 0 and m != OTHER_MODULES), key=lambda m: -held[m])[:HEAVIEST]
        modules = ", ".join(f"{shorten(module, 40)} {format_bytes(held[module])}" for module in heaviest)
        maker = shorten(composition.maker or MISSING, 64)
        table.add_row(*map(Text, (shorten(row.method, LONGEST_HEADING), maker, modules or MISSING)))
    return table


def _notes(described: Mapping[Row, derived.Composition]) -> list[str]:
    held = present(each.components for each in described.values())
    private = any(component_named(key).private_only for key in held)
    notes = ["* only private training holds this."] if private else []
    if any(row.median_ms for row in described):
        notes.append("memory/time: MiB at the peak for each millisecond of a step.")
        notes += filter(None, [explain(row.ratio_doubt for row in described)])
    reasons: dict[str, list[str]] = {}  # what is known of unattributed bytes -> methods that share it
    for row, composition in described.items():
        if count := composition.components.get(UNATTRIBUTED):
            known = ", ".join(f"{part['what']} {format_bytes(part['bytes'])}" for part in composition.unattributed)
            reasons.setdefault(format_bytes(count) + (f" ({known})" if known else ""), []).append(row.method)
    if reasons:
        told = "; ".join(f"{', '.join(methods)}: {reason}" for reason, methods in reasons.items())
        notes.append(f"Unattributed (the allocator's peak less all that was tracked): {told}.")
    return notes


def _largest_tensors(rows: Sequence[Row]) -> list[RenderableType]:
    texts = ("shape", "for", "made by", "line")
    table = bare_table("method", "size", "", *texts, left=("", *texts), wrap=texts)
    for row in rows:
        tensors = tensors_of(row)
        for place, tensor in enumerate(tensors["largest"][:SHOWN_TENSORS] if tensors else ()):
            several = f"× {tensor['count']}" if tensor["count"] > 1 else ""
            made = (shorten(derived.maker_of(tensor), 20), shorten(derived.place_of(tensor, short=True), 40))
            what = (derived.shape_in_words(tensor), component_named(tensor["component"]).label, *made)
            method = "" if place else shorten(row.method, 12)
            table.add_row(*map(Text, (method, format_bytes(tensor["bytes"]), several, *what)))
    return [table] if table.row_count else []
