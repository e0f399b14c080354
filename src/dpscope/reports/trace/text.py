"""The part of the summary that says where a step's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.reports.doubt import MARK, is_stretched, marked
from dpscope.reports.tables import STANDARD, Row
from dpscope.reports.trace.data import (
    Difference,
    boundness,
    differences,
    phase_names,
    stretch,
    stretched_in_words,
    trace_of,
    traced,
)
from dpscope.reports.words import shorten, size_in_words
from dpscope.units import MIB, MISSING, format_bytes, format_ms
from dpscope.vocabulary.families import FAMILY_LABELS

MOST = 10  # lines of a table of differences
TRACE_NOTE = (
    "Traced steps run under torch.profiler, which slows the host down: compare their parts, and take times of steps "
    "from the table above."
)


def trace_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """Phases, GPU, waits and differences of every size that was traced."""
    parts: list[RenderableType] = []
    for group in traced(rows):
        where = size_in_words(group[0].first.spec)
        parts += [Text(f"Where the time goes ({where}): milliseconds of a traced step", style="bold"), ""]
        parts += [_phase_table(group), ""]
        if doubt := stretched_in_words(group):
            parts += [Text(doubt), ""]
        if any("gpu" in trace_of(row) for row in group):
            parts += [_gpu_table(group), "", *(Text(line) for line in _bound_lines(group)), ""]
            parts += [_family_table(group), ""]
        for found in differences(group):
            parts += [*_difference(found), ""]
        parts += [Text(line) for line in _findings(group)]
        parts += [Text(line) for line in _asked_for(group)]
    return [*parts, Text(TRACE_NOTE, style="dim")] if parts else []


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place == 0 else "right", no_wrap=True)
    return table


def _phase_table(rows: Sequence[Row]) -> Table:
    """A column a method (two on a GPU); the host's column sums to the step."""
    gpu = any("gpu" in trace_of(row) for row in rows)
    table = _table("phase", *(h for row in rows for h in _phase_headings(row, gpu=gpu)))
    for name in phase_names(rows):
        table.add_row(name, *(cell for row in rows for cell in _phase_cells(row, name, gpu=gpu)))
    if gpu:
        table.add_row("GPU idle", *(cell for row in rows for cell in _gpu_cells(row, "idle_ms")))
        if any(trace_of(row).get("gpu", {}).get("overlap_ms", 0.0) >= 0.01 for row in rows):
            table.add_row("less: side by side", *(cell for row in rows for cell in _gpu_cells(row, "overlap_ms", -1)))
    table.add_row("traced step", *(cell for row in rows for cell in _step_cells(row, gpu=gpu)), style="bold")
    table.add_row(
        "unprofiled step",
        *(cell for row in rows for cell in (marked(_figure(row.median_ms), row.time_doubt), *([""] if gpu else []))),
    )
    return table


def _phase_headings(row: Row, *, gpu: bool) -> list[str]:
    return [f"{row.method} host", "GPU"] if gpu else [row.method]


def _phase_cells(row: Row, name: str, *, gpu: bool) -> list[str]:
    part: dict[str, Any] = next((p for p in trace_of(row)["phases"] if p["phase"] == name), {})
    return [_figure(part.get(column)) for column in (("cpu_ms", "gpu_ms") if gpu else ("cpu_ms",))]


def _gpu_cells(row: Row, name: str, sign: int = 1) -> list[str]:
    value = trace_of(row).get("gpu", {}).get(name)
    return ["", _figure(None if value is None else sign * value)]


def _step_cells(row: Row, *, gpu: bool) -> list[str]:
    cell = marked(_figure(trace_of(row)["step_ms"]), MARK if is_stretched(stretch(row)) else "")
    return [cell, cell] if gpu else [cell]


def _figure(milliseconds: float | None) -> str:
    return MISSING if milliseconds is None else f"{milliseconds:.2f}" if milliseconds < 100 else f"{milliseconds:.1f}"


def _gpu_table(rows: Sequence[Row]) -> Table:
    table = _table(
        "GPU", "busy", "idle", "waiting for the host", "between queued", "kernels", "mean kernel", "copies to host"
    )
    for row in rows:
        gpu = trace_of(row).get("gpu")
        if gpu is None:
            continue
        to_host = [copy for copy in trace_of(row)["copies"] if copy["kind"] == "DtoH"]
        table.add_row(
            row.method,
            *(
                format_ms(gpu[name])
                for name in ("busy_ms", "idle_ms", "idle_waiting_for_host_ms", "idle_between_queued_ms")
            ),
            f"{gpu['kernels']:.0f}",
            f"{gpu['mean_kernel_us']:.1f} µs",
            f"{sum(copy['count'] for copy in to_host):.0f} ({_size(sum(copy['bytes'] for copy in to_host))})",
        )
    return table


def _size(count: float) -> str:
    return format_bytes(count) if count >= MIB / 10 else f"{count:.0f} B"


def _bound_lines(rows: Sequence[Row]) -> list[str]:
    return [f"{row.method} is {verdict.sentence}." for row in rows if (verdict := boundness(row)) is not None]


def _family_table(rows: Sequence[Row]) -> Table:
    """Kernel time by family, the families in order of the most time any method spends in them."""
    table = _table("kernels by family", *(f"{row.method} ms" for row in rows))
    by_row = [{part["family"]: part["ms"] for part in trace_of(row).get("families", [])} for row in rows]
    names = sorted({name for times in by_row for name in times}, key=lambda n: -max(t.get(n, 0.0) for t in by_row))
    for name in names:
        table.add_row(FAMILY_LABELS.get(name, name), *(_figure(times.get(name)) for times in by_row))
    words = {part["word"] for row in rows for part in trace_of(row)["named"] if part["kernels"] or part["operators"]}
    for word in sorted(words):
        table.add_row(f"named …{word}…", *(_named_cell(row, word) for row in rows), style="dim")
    return table


def _named_cell(row: Row, word: str) -> str:
    part = next(part for part in trace_of(row)["named"] if part["word"] == word)
    return _figure(max(part["kernel_ms"], part["operator_gpu_ms"]))


def _difference(found: Difference) -> list[RenderableType]:
    what = "GPU time" if found.basis == "gpu" else "time on the host"
    longer = marked(f"{found.total_ms:+.2f} ms", found.doubt)
    title = f"{found.method} against {STANDARD}: {longer} a traced step, {what} by operator"
    table = _table("operator", "phase", "", STANDARD, found.method, "difference")
    table.columns[1].justify = table.columns[2].justify = "left"
    operators = [change for change in found.changes if change.phase]
    for change in operators[:MOST]:
        table.add_row(
            operator_label(change.operator, 40),
            change.phase,
            change.kind,
            _figure(change.before_ms or None),
            _figure(change.after_ms),
            f"{change.ms:+.2f}",
        )
    if left := operators[MOST:]:
        table.add_row(f"{len(left)} others", "", "", *_sums(left))
    for change in found.changes:
        if not change.phase and (change.before_ms or change.after_ms):
            table.add_row(change.operator, "", "", *_sums([change]))
    whole = [marked(cell, found.doubt) for cell in _sums(found.changes)]
    table.add_row("the whole step", "", "", *whole, style="bold")
    return [Text(title, style="bold"), table]


def operator_label(name: str, length: int) -> str:
    """As short as it can be told apart: autograd's nodes without the engine's prefix."""
    return shorten(name.replace("autograd::engine::evaluate_function: ", "autograd: "), length)


def _sums(changes: Sequence[Any]) -> list[str]:
    before, after = sum(change.before_ms for change in changes), sum(change.after_ms for change in changes)
    return [_figure(before), _figure(after), f"{after - before:+.2f}"]


def _findings(rows: Sequence[Row]) -> list[str]:
    """Waits and casts, a line each for every method."""
    lines = []
    for row in rows:
        trace = trace_of(row)
        waits = trace["synchronisations"]
        on_gpu = trace["basis"] == "gpu"
        verb = "the host waits for the GPU" if on_gpu else "values are handed to Python (for tensors on a GPU: a wait)"
        if waits:
            told = ", ".join(_wait(wait) for wait in waits[:3])
            more = f", and {len(waits) - 3} other places" if len(waits) > 3 else ""
            lines.append(f"{row.method}: {verb} {sum(w['count'] for w in waits):.0f} times a step: {told}{more}.")
        elif on_gpu:
            lines.append(f"{row.method}: no wait for the GPU within a step.")
        if trace["casts"]:
            count = sum(cast["count"] for cast in trace["casts"])
            spent = sum(cast["gpu_ms"] if on_gpu else cast["cpu_ms"] for cast in trace["casts"])
            lines.append(f"{row.method}: {count:.0f} casts between number formats a step, {format_ms(spent)}.")
    return [*lines, ""] if lines else []


def _wait(wait: dict[str, Any]) -> str:
    where = f" at {wait['where']}" if wait["where"] else ""
    return f"{wait['count']:.0f}× {wait['operator']} in {wait['phase']}{where} ({format_ms(wait['ms'])})"


def _asked_for(rows: Sequence[Row]) -> list[str]:
    """What --modules, --memory and --flops found, a line each for every method."""
    lines = [line for row in rows for line in (_modules(row), _memory(row), _flops(row)) if line]
    return [*lines, ""] if lines else []


def _modules(row: Row) -> str:
    trace = trace_of(row)
    column = "gpu_ms" if trace["basis"] == "gpu" else "cpu_ms"
    modules = [module for module in trace.get("modules", []) if not module["module"].startswith("(")]
    told = ", ".join(f"{module['module']} {format_ms(module[column])}" for module in modules[:5])
    return f"{row.method}: most expensive modules, forward and backward: {told}." if told else ""


def _memory(row: Row) -> str:
    operators = trace_of(row).get("memory", {}).get("operators", [])
    told = ", ".join(f"{each['operator']} {format_bytes(each['allocated_bytes'])}" for each in operators[:5])
    return f"{row.method}: operators that ask for most memory in a step: {told}." if told else ""


def _flops(row: Row) -> str:
    total = sum(trace_of(row).get("flops", {}).values())
    if not total:
        return ""
    rate = f", {total / row.median_ms / 1e9:.3g} TFLOP/s of the unprofiled step" if row.median_ms else ""
    return f"{row.method}: {total / 1e9:.2f} GFLOP counted in a step{rate}."
