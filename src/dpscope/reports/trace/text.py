"""The parts of the summary that say where a step's time goes: by torch.profiler, and by Nsight Systems.

Figures of a capture are of an average captured step: GPU time by phase, kernels, copies, CUDA calls, and idle time.
They come from a profiled run and do not replace the step times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.plain_text import bare_table
from dpscope.reports.looks import in_longest_order, operator_label
from dpscope.reports.tables import MARK, STRETCHED, Row, group_by_size, marked, once_a_row
from dpscope.reports.trace import data
from dpscope.reports.trace.data import GPU, IDLE, OperatorChange, StepDifference
from dpscope.results.payloads.trace import CollectiveTime, Named, NsysPayload, TracedRank
from dpscope.units import KIB, MIB, MISSING, format_bytes, format_ms, format_ratio
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


MOST_KERNELS, MOST_CALLS, MOST_GAPS, MOST_NAMES = 5, 4, 3, 5
LAUNCH_BOUND = 0.1  # of the span: idle for want of a launch, from here on a step is worth calling launch-bound
AGREE = 0.05  # of a phase's GPU time: what two profilers may differ by
WORTH_COMPARING = 0.02  # of all GPU time: shorter phases are a few short kernels, and differ from run to run
LONG_CAPTURE_SECONDS = 60.0


@dataclass(frozen=True)
class Capture:
    name: str  # of the method, or of the file
    seen: NsysPayload
    unprofiled_ms: float | None = None  # the step's time without nsys, where it is known

    @property
    def gpu_ms(self) -> dict[str, float]:
        """GPU time by phase."""
        return {phase["phase"]: phase["gpu_ms"] for phase in self.seen["phases"]}

    @property
    def launch_bound(self) -> bool:
        """True if the GPU waits for the host, by the unprofiled time if known: nsys slows the host, not the kernels."""
        gpu = self.seen["gpu"]
        if self.unprofiled_ms:
            return gpu["busy_ms"] < data.BUSY_ENOUGH * self.unprofiled_ms
        return gpu["idle_waiting_for_host_ms"] > LAUNCH_BOUND * gpu["span_ms"] > 0


def nsys_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """Return everything nsys saw of the rows that it looked at; nothing if there are none."""
    parts: list[RenderableType] = []
    groups = group_by_size(rows)
    for group in groups:
        if captures := [capture for row in group if (capture := capture_of(row))]:
            where = f", {group[0].where}" if len(groups) > 1 else ""
            parts += ["", *describe_captures(captures, where=where), *map(Text, agreement(group))]
    return parts[1:]


@once_a_row
def capture_of(row: Row) -> Capture | None:
    result = row.measured.get("nsys")
    found = result is not None and result.ok and result.nsys
    return Capture(row.method, found, row.median_ms) if found else None


def describe_captures(captures: Sequence[Capture], *, where: str = "") -> list[RenderableType]:
    """Return the tables and sentences of captures that are compared with each other."""
    phases = any(each.seen["phases"] for each in captures)
    what = "GPU time by phase, of an average captured step" if phases else "GPU time of the whole capture"
    parts: list[RenderableType] = [Text(f"Nsight Systems{where}: {what}", style="bold"), _captured_phases(captures), ""]
    parts += [Text(line) for each in captures for line in _sentences(each)]
    parts += [Text(warning, style="bold red") for each in captures if (warning := _warning(each))]
    for heading, (find, headings) in LISTINGS.items():
        lines = [(each.name, find(each.seen)) for each in captures]
        if any(listed for _, listed in lines):
            parts += ["", Text(heading, style="bold"), _listing(lines, headings)]
    return [*parts, "", *(Text(note, style="dim") for note in _capture_notes(captures))]


def _captured_phases(captures: Sequence[Capture]) -> Table:
    """Return the phases in the order of the capture that has most of them."""
    names = in_longest_order(each.gpu_ms for each in captures)
    base = next((each.seen["gpu"]["total_ms"] for each in captures if each.name == STANDARD), None)
    table = bare_table("method", *names, "GPU time", "×", "busy", "kernels")
    for each in captures:
        gpu, kernels = each.seen["gpu"], f"{each.seen['kernel_total']['calls']:,.0f}"
        times = [_time(ms) for ms in (*map(each.gpu_ms.get, names), gpu["total_ms"])]
        ratio = format_ratio(gpu["total_ms"] / base if base else None)
        table.add_row(each.name, *times, ratio, _share(gpu["busy_ms"], gpu["span_ms"]), kernels)
    return table


def _sentences(capture: Capture) -> list[str]:
    gpu, name = capture.seen["gpu"], capture.name
    waiting = f", {_time(gpu['idle_waiting_for_host_ms'])} of it waiting for the host" if gpu["idle_ms"] else ""
    bound = ": launch-bound" if capture.launch_bound else ""
    lines = [f"{name}: the GPU idles {_time(gpu['idle_ms'])} of {_time(gpu['span_ms'])}{waiting}{bound}."]
    if (seconds := gpu["span_ms"] * (capture.seen["steps"] or 1) / 1e3) > LONG_CAPTURE_SECONDS:
        lines.append(f"{name}: the capture is {seconds:.0f} s long, too large to open well: --captured-steps 1.")
    return lines


def _warning(capture: Capture) -> str:
    """Warn of a report that holds more than it should."""
    if not (foreign := capture.seen.get("foreign_variables")):
        return ""
    some = ", ".join(foreign[:MOST_NAMES]) + (" …" if len(foreign) > MOST_NAMES else "")
    return (
        f"{capture.name}: DO NOT SHARE this report: nsys wrote variables of other processes into it ({some}). Share a "
        "stripped export (docs/nsys.md), or start dpscope as `env -i PATH=… HOME=… dpscope nsys …`."
    )


Lines = list[tuple[str, ...]]


def _kernels(seen: NsysPayload) -> Lines:
    total = seen["kernel_total"]["ms"]
    return [
        (_time(k["ms"]), _share(k["ms"], total), f"{k['calls']:,.0f}", _time(k["ms"] / (k["calls"] or 1)), k["short"])
        for k in seen["kernels"][:MOST_KERNELS]
    ]


def _copies(seen: NsysPayload) -> Lines:
    memsets: list[Named] = [{"name": "memset", **seen["memsets"]}] if seen["memsets"]["calls"] else []
    found = ((copy, copy.get("bytes", 0)) for copy in (*seen["copies"], *memsets))
    sizes = [(copy, format_bytes(count) if count >= MIB else f"{count / KIB:.1f} KiB") for copy, count in found]
    return [(f"{copy['calls']:,.1f}", size, _time(copy["ms"]), copy["name"]) for copy, size in sizes]


def _calls(seen: NsysPayload) -> Lines:
    return [(f"{call['calls']:,.0f}", _time(call["ms"]), call["name"]) for call in seen["api"][:MOST_CALLS]]


def _gaps(seen: NsysPayload) -> Lines:
    why = {True: "waiting for the host", False: "between queued work"}
    found = ((gap, why[gap["waiting_for_host"]]) for gap in seen["gaps"][:MOST_GAPS])
    return [(_time(gap["ms"]), f"{reason}; {gap['phase']}; {gap['before']}") for gap, reason in found]


# What is listed of each capture, and its columns: the last is text.
LISTINGS: dict[str, tuple[Callable[[NsysPayload], Lines], tuple[str, ...]]] = {
    "Longest kernels": (_kernels, ("time", "share", "calls", "mean", "kernel")),
    "Copies": (_copies, ("calls", "bytes", "time", "what")),
    "CUDA calls of the host": (_calls, ("calls", "time", "call")),
    "Longest idle gaps of the GPU": (_gaps, ("gap", "why, in which phase, before which kernel")),
}


def _listing(lines: Sequence[tuple[str, Lines]], headings: Sequence[str]) -> Table:
    table = bare_table("method", *headings)
    table.expand = True  # text takes what numbers leave, and is cut there
    text = table.columns[-1]
    text.justify, text.overflow, text.ratio = "left", "ellipsis", 1
    for name, listed in lines:
        for number, cells in enumerate(listed):
            table.add_row("" if number else name, *cells)
    return table


def _share(value: float, whole: float) -> str:
    return f"{value / whole:.0%}" if whole else MISSING


def _time(ms: float | None) -> str:
    """Format a short time: below a millisecond in microseconds."""
    return format_ms(ms) if ms is None or ms >= 1 or ms == 0 else f"{1e3 * ms:.1f} µs"


def agreement(rows: Sequence[Row]) -> list[str]:
    """Return how far nsys and torch.profiler agree on GPU time by phase, where both looked at the same row."""
    lines = []
    for row in rows:
        capture, step = capture_of(row), data.traced_step(row)
        if capture is None or step is None or step.gpu is None:
            continue
        ours, theirs = capture.gpu_ms, {part["phase"]: part["gpu_ms"] for part in step.trace["phases"]}
        total = sum(theirs.values())
        compared = {name: ms for name, ms in theirs.items() if ms > WORTH_COMPARING * total}
        if not compared:
            continue
        apart = {name: abs(ours.get(name, 0.0) - ms) / ms for name, ms in compared.items()}
        worst = max(apart, key=lambda name: apart[name])
        verdict = "agree" if apart[worst] <= AGREE else "DISAGREE"
        lines.append(
            f"{row.method}: nsys and torch.profiler {verdict} on GPU time by phase: {format_ms(sum(ours.values()))} "
            f"and {format_ms(total)} in all; furthest apart in {worst}, {format_ms(ours.get(worst))} and "
            f"{format_ms(theirs[worst])} ({apart[worst]:.1%})."
        )
    return ["", *lines] if lines else []


def _capture_notes(captures: Sequence[Capture]) -> list[str]:
    notes = [
        "GPU time: kernels, copies and memsets, by the phase in which they were launched, from whatever thread. Busy: "
        "the share of the time between the first and the last of them. Times under a profiler are not step times.",
    ]
    launch_bound = "Launch-bound: the host cannot keep up. Fewer, larger kernels, a larger batch or CUDA graphs help."
    notes += [launch_bound] if any(each.launch_bound for each in captures) else []
    if any(not each.seen["phases"] for each in captures):
        notes.append("No phases where a capture holds no NVTX ranges of them; then figures are of the whole capture.")
    return notes
