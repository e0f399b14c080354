"""The part of the summary that says where a step's time goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.plain_text import bare_table
from dpscope.reports.looks import operator_label
from dpscope.reports.tables import MARK, STRETCHED, Row, marked
from dpscope.reports.trace import data
from dpscope.reports.trace.data import GPU, IDLE, OperatorChange, StepDifference
from dpscope.results.payloads.trace import CollectiveTime, TracedRank
from dpscope.units import MIB, MISSING, format_bytes, format_ms
from dpscope.vocabulary.methods import STANDARD
from dpscope.vocabulary.phases import FAMILY_LABELS

MOST_OPERATORS = 10  # lines of a table of differences
LISTED_ONES = 5  # modules and operators in a sentence
TRACE_NOTE = (
    "Traced steps run under torch.profiler, which slows the host down: compare their parts, and take times of steps "
    "from the table above."
)


def trace_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """Return phases, GPU, waits and differences of every size that was traced."""
    parts: list[RenderableType] = []
    for steps in data.traced(rows):
        heading = f"Where the time goes ({steps[0].row.where}): milliseconds of a traced step"
        parts += [Text(heading, style="bold"), "", _phase_table(steps), ""]
        if doubt := data.stretched_in_words(steps):
            parts += [Text(doubt), ""]
        if any(step.gpu for step in steps):
            bounds = [Text(f"{step.method} is {step.bound}.") for step in steps if step.bound]
            parts += [_gpu_table(steps), "", *bounds, "", _family_table(steps), ""]
        for found in data.differences(steps):
            parts += [*_difference(found), ""]
        for sentences in (_losses, _costs):
            told = [Text(line) for step in steps for line in sentences(step)]
            parts += [*told, ""] if told else []
    return [*parts, Text(TRACE_NOTE, style="dim")] if parts else []


def _ms(milliseconds: float | None) -> str:
    return MISSING if milliseconds is None else f"{milliseconds:.2f}" if milliseconds < 100 else f"{milliseconds:.1f}"


def _phase_table(steps: Sequence[data.TracedStep]) -> Table:
    """Return a column a method (two on a GPU); the host's column sums to the step."""
    gpu = any(step.gpu for step in steps)
    headings = [(f"{step.method} host", "GPU") if gpu else (step.method,) for step in steps]
    table = bare_table("phase", *(heading for pair in headings for heading in pair))

    def add(name: str, cells: Iterable[tuple[str, str]], style: str | None = None) -> None:
        table.add_row(name, *(cell for pair in cells for cell in (pair if gpu else pair[:1])), style=style)

    for name in data.phase_names(steps):
        found = [{part["phase"]: part for part in step.trace["phases"]}.get(name) for step in steps]
        add(name, [(_ms(part["cpu_ms"]), _ms(part["gpu_ms"])) if part else (MISSING, MISSING) for part in found])
    if gpu:
        add(IDLE, [("", _ms(step.gpu["idle_ms"] if step.gpu else None)) for step in steps])
        if any(step.gpu and step.gpu["overlap_ms"] >= 0.01 for step in steps):
            add("less: side by side", [("", _ms(-step.gpu["overlap_ms"] if step.gpu else None)) for step in steps])
    whole = [marked(_ms(step.trace["step_ms"]), MARK if step.stretch > STRETCHED else "") for step in steps]
    add("traced step", [(cell, cell) for cell in whole], style="bold")
    add("unprofiled step", [(marked(_ms(step.row.median_ms), step.row.time_doubt), "") for step in steps])
    return table


def _gpu_table(steps: Sequence[data.TracedStep]) -> Table:
    headings = (
        "busy",
        "host busy",
        "idle",
        "waiting for the host",
        "between queued",
        "kernels",
        "mean kernel",
        "copies to host",
    )
    table = bare_table("GPU", *headings)
    for step in steps:
        if gpu := step.gpu:
            idle = (gpu["idle_ms"], gpu["idle_waiting_for_host_ms"], gpu["idle_between_queued_ms"])
            kernels = (f"{gpu['kernels']:.0f}", f"{gpu['mean_kernel_us']:.1f} µs")
            busy = (gpu["busy_ms"], gpu.get("host_busy_ms"))
            to_host = [copy for copy in step.trace.get("copies", []) if copy["kind"] == "DtoH"]
            size = sum(copy["bytes"] for copy in to_host)
            told = format_bytes(size) if size >= MIB / 10 else f"{size:.0f} B"
            copies = f"{sum(copy['count'] for copy in to_host):.0f} ({told})"
            table.add_row(step.method, *map(format_ms, (*busy, *idle)), *kernels, copies)
    return table


def _family_table(steps: Sequence[data.TracedStep]) -> Table:
    table = bare_table("kernels by family", *(f"{step.method} ms" for step in steps))
    for name, times in data.family_series(steps).items():
        table.add_row(FAMILY_LABELS.get(name, name), *map(_ms, times))
    named = [{part["word"]: part for part in step.trace["named"]} for step in steps]
    for word in sorted({w for own in named for w, part in own.items() if part["kernels"] or part["operators"]}):
        found = [own.get(word) for own in named]
        times = [max(part["kernel_ms"], part["operator_gpu_ms"]) if part else None for part in found]
        table.add_row(f"named …{word}…", *map(_ms, times), style="dim")
    return table


def _difference(found: StepDifference) -> list[RenderableType]:
    what = "GPU time" if found.basis == GPU else "time on the host"
    longer = marked(f"{found.total_ms:+.2f} ms", found.doubt)
    title = f"{found.method} against {STANDARD}: {longer} a traced step, {what} by operator"
    table = bare_table("operator", "phase", "", STANDARD, found.method, "difference", left=("phase", ""))
    operators = [change for change in found.changes if change.phase]
    for change in operators[:MOST_OPERATORS]:
        times = (_ms(change.before_ms or None), _ms(change.after_ms), f"{change.ms:+.2f}")
        table.add_row(operator_label(change.operator, 40), change.phase, change.kind, *times)
    if left := operators[MOST_OPERATORS:]:
        table.add_row(f"{len(left)} others", "", "", *_sums(left))
    for change in found.changes:
        if not change.phase and (change.before_ms or change.after_ms):
            table.add_row(change.operator, "", "", *_sums([change]))
    whole = [marked(cell, found.doubt) for cell in _sums(found.changes)]
    table.add_row("the whole step", "", "", *whole, style="bold")
    return [Text(title, style="bold"), table]


def _sums(changes: Sequence[OperatorChange]) -> list[str]:
    before, after = sum(change.before_ms for change in changes), sum(change.after_ms for change in changes)
    return [_ms(before), _ms(after), f"{after - before:+.2f}"]


def _losses(step: data.TracedStep) -> Iterator[str]:
    """Yield what a step spends in collectives, in waits for the GPU and in casts."""
    if found := step.trace.get("collectives"):
        kinds = ", ".join(
            f"{kind['count']:.0f}× {kind['collective']} {format_ms(kind['ms'])}" for kind in found["kinds"]
        )
        exposed = f", {format_ms(found['exposed_ms'])} while nothing else ran" if "exposed_ms" in found else ""
        told = f"{step.method}: collectives are under way in {_under_way(found)} of rank 0{exposed} ({kinds})."
        others = ", ".join(f"rank {rank['rank']}: {_under_way(rank)}" for rank in step.trace.get("ranks", []))
        yield f"{told} By rank: {others}." if others else told
    if waits := step.trace["synchronisations"]:
        verb = (
            "the host waits for the GPU" if step.gpu else "values are handed to Python (for tensors on a GPU: a wait)"
        )
        more = f", and {len(waits) - 3} other places" if len(waits) > 3 else ""
        places = ", ".join(
            f"{wait['count']:.0f}× {wait['operator']} in {wait['phase']}{' at ' * bool(wait['where'])}{wait['where']} "
            f"({format_ms(wait['ms'])})"
            for wait in waits[:3]
        )
        yield f"{step.method}: {verb} {sum(wait['count'] for wait in waits):.0f} times a step: {places}{more}."
    elif step.gpu:
        yield f"{step.method}: no wait for the GPU within a step."
    if casts := step.trace["casts"]:
        spent = sum(cast["gpu_ms"] if step.gpu else cast["cpu_ms"] for cast in casts)
        count = sum(cast["count"] for cast in casts)
        yield f"{step.method}: {count:.0f} casts between number formats a step, {format_ms(spent)}."


def _under_way(found: CollectiveTime | TracedRank) -> str:
    return f"{format_ms(found['under_way_ms'])} of {format_ms(found['step_ms'])}"


def _costs(step: data.TracedStep) -> Iterator[str]:
    """Yield the most expensive modules and operators, and the operations of a step, if they were asked for."""
    modules = [module for module in step.trace.get("modules", []) if not module["module"].startswith("(")]
    times = [(module["module"], module["gpu_ms"] if step.gpu else module["cpu_ms"]) for module in modules[:LISTED_ONES]]
    if told := ", ".join(f"{name} {format_ms(ms)}" for name, ms in times):
        yield f"{step.method}: most expensive modules, forward and backward: {told}."
    operators = step.trace["memory"]["operators"][:LISTED_ONES] if "memory" in step.trace else []
    if told := ", ".join(f"{each['operator']} {format_bytes(each['allocated_bytes'])}" for each in operators):
        yield f"{step.method}: operators that ask for most memory in a step: {told}."
    if total := sum(step.trace.get("flops", {}).values()):
        time = step.row.median_ms
        rate = f", {total / time / 1e9:.3g} TFLOP/s of the unprofiled step" if time else ""
        yield f"{step.method}: {total / 1e9:.2f} GFLOP counted in a step{rate}."
