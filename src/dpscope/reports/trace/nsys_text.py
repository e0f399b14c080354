"""Text on what Nsight Systems saw: GPU time by phase, kernels, copies, CUDA calls, and idle GPU time.

Figures are of an average captured step. They come from a profiled run and do not replace the step times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.plain_text import bare_table
from dpscope.reports.looks import in_longest_order
from dpscope.reports.tables import Row, group_by_size, once_a_row
from dpscope.reports.trace.data import BUSY_ENOUGH, traced_step
from dpscope.results.payloads.trace import Named, NsysPayload
from dpscope.units import KIB, MIB, MISSING, format_bytes, format_ms, format_ratio
from dpscope.vocabulary.methods import STANDARD

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
            return gpu["busy_ms"] < BUSY_ENOUGH * self.unprofiled_ms
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
    parts: list[RenderableType] = [Text(f"Nsight Systems{where}: {what}", style="bold"), _phase_table(captures), ""]
    parts += [Text(line) for each in captures for line in _sentences(each)]
    parts += [Text(warning, style="bold red") for each in captures if (warning := _warning(each))]
    for heading, (find, headings) in LISTINGS.items():
        lines = [(each.name, find(each.seen)) for each in captures]
        if any(listed for _, listed in lines):
            parts += ["", Text(heading, style="bold"), _listing(lines, headings)]
    return [*parts, "", *(Text(note, style="dim") for note in _notes(captures))]


def _phase_table(captures: Sequence[Capture]) -> Table:
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
        capture, step = capture_of(row), traced_step(row)
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


def _notes(captures: Sequence[Capture]) -> list[str]:
    notes = [
        "GPU time: kernels, copies and memsets, by the phase in which they were launched, from whatever thread. Busy: "
        "the share of the time between the first and the last of them. Times under a profiler are not step times.",
    ]
    launch_bound = "Launch-bound: the host cannot keep up. Fewer, larger kernels, a larger batch or CUDA graphs help."
    notes += [launch_bound] if any(each.launch_bound for each in captures) else []
    if any(not each.seen["phases"] for each in captures):
        notes.append("No phases where a capture holds no NVTX ranges of them; then figures are of the whole capture.")
    return notes
