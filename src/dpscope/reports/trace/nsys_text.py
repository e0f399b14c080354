"""What Nsight Systems saw, for people: GPU time by phase, kernels, copies, CUDA calls, and when the GPU was idle.

Figures are of an average captured step. They come from a profiled run and stand beside, not for, the step times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.reports.tables import STANDARD, Row, group_by_size
from dpscope.reports.trace.data import BUSY_ENOUGH
from dpscope.units import MIB, MISSING, format_bytes, format_ms, format_ratio

NSYS, TRACE = "nsys", "trace"
MOST_KERNELS, MOST_CALLS, MOST_GAPS, MOST_NAMES = 5, 4, 3, 5
LAUNCH_BOUND = 0.1  # of the span: idle for want of a launch, from here on a step is worth calling launch-bound
AGREE = 0.05  # of a phase's GPU time: what two profilers may differ by
WORTH_COMPARING = 0.02  # of all GPU time: shorter phases are a few short kernels, and differ from run to run
LONG_CAPTURE_SECONDS = 60.0

Seen = tuple[str, Any]  # whose capture it is -> Result.nsys


def nsys_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """Everything nsys saw of the rows that it looked at; nothing if there are none."""
    parts: list[RenderableType] = []
    for group in group_by_size(row for row in rows if _capture(row)):
        several = len({row.comparison for row in rows}) > 1
        where = _where(group[0]) if several else ""
        parts += ["", *describe_captures([(row.method, _with_time(row)) for row in group], where=where)]
        parts += [Text(line) for line in agreement(group)]
    return parts[1:]


def _with_time(row: Row) -> dict[str, Any]:
    return {**_capture(row), "unprofiled_ms": row.median_ms}


def describe_captures(captures: Sequence[Seen], *, where: str = "") -> list[RenderableType]:
    """Tables and sentences of captures that are compared with each other."""
    phases = any(seen["phases"] for _, seen in captures)
    what = "GPU time by phase, of an average captured step" if phases else "GPU time of the whole capture"
    heading = f"Nsight Systems{where}: {what}"
    parts: list[RenderableType] = [Text(heading, style="bold"), _phase_table(captures), ""]
    parts += [Text(line) for line in _sentences(captures)]
    parts += [Text(line, style="bold red") for line in _warnings(captures)]
    parts += ["", Text("Longest kernels", style="bold"), _kernel_table(captures)]
    if any(seen["copies"] or seen["memsets"]["calls"] for _, seen in captures):
        parts += ["", Text("Copies", style="bold"), _copy_table(captures)]
    if any(seen["api"] for _, seen in captures):
        parts += ["", Text("CUDA calls of the host", style="bold"), _call_table(captures)]
    if any(seen["gaps"] for _, seen in captures):
        parts += ["", Text("Longest idle gaps of the GPU", style="bold"), _gap_table(captures)]
    return [*parts, "", *(Text(note, style="dim") for note in _notes(captures))]


def _warnings(captures: Sequence[Seen]) -> list[str]:
    """Whose reports hold more than they should."""
    lines = []
    for name, seen in captures:
        if foreign := seen.get("foreign_variables"):
            some = ", ".join(foreign[:MOST_NAMES]) + (" …" if len(foreign) > MOST_NAMES else "")
            lines.append(
                f"{name}: DO NOT SHARE this report: nsys wrote variables of other processes into it ({some}). Share a "
                "stripped export (docs/nsys.md), or start dpscope as `env -i PATH=… HOME=… dpscope nsys …`."
            )
    return lines


def agreement(rows: Sequence[Row]) -> list[str]:
    """How far nsys and torch.profiler agree on GPU time by phase, where both looked at the same row."""
    lines = []
    for row in rows:
        traced = row.measured.get(TRACE)
        if traced is None or not traced.ok or not traced.trace.get("gpu"):
            continue
        ours, theirs = (_gpu_ms(part["phases"]) for part in (_capture(row), traced.trace))
        total = sum(theirs.values())
        apart = {
            name: abs(ours.get(name, 0.0) - theirs[name]) / theirs[name]
            for name in theirs
            if theirs[name] > WORTH_COMPARING * total
        }
        if not apart:
            continue
        worst = max(apart, key=lambda name: apart[name])
        verdict = "agree" if apart[worst] <= AGREE else "DISAGREE"
        lines.append(
            f"{row.method}: nsys and torch.profiler {verdict} on GPU time by phase: {format_ms(sum(ours.values()))} "
            f"and {format_ms(total)} in all; furthest apart in {worst}, {format_ms(ours.get(worst))} and "
            f"{format_ms(theirs[worst])} ({apart[worst]:.1%})."
        )
    return ["", *lines] if lines else []


def _gpu_ms(phases: Sequence[Any]) -> dict[str, float]:
    return {phase["phase"]: phase["gpu_ms"] for phase in phases}


def _capture(row: Row) -> Any:
    result = row.measured.get(NSYS)
    return result.nsys if result is not None and result.ok else {}


def _where(row: Row) -> str:
    spec = row.first.spec
    return f", batch {spec['batch_size']}" + (f", sequence {spec['seq_len']}" if spec["seq_len"] else "")


def _phase_table(captures: Sequence[Seen]) -> Table:
    names = list(dict.fromkeys(phase["phase"] for _, seen in captures for phase in seen["phases"]))
    order = _longest_order([[phase["phase"] for phase in seen["phases"]] for _, seen in captures], names)
    base = next((seen["gpu"]["total_ms"] for method, seen in captures if method == STANDARD), None)
    table = _table("method", *order, "GPU time", "×", "busy", "kernels")
    for method, seen in captures:
        figures = _gpu_ms(seen["phases"])
        gpu = seen["gpu"]
        ratio = format_ratio(gpu["total_ms"] / base if base else None)
        busy = f"{gpu['busy_ms'] / gpu['span_ms']:.0%}" if gpu["span_ms"] else MISSING
        total = [_time(gpu["total_ms"]), ratio, busy, f"{seen['kernel_total']['calls']:,.0f}"]
        table.add_row(method, *(_time(figures.get(name)) for name in order), *total)
    return table


def _longest_order(orders: Sequence[Sequence[str]], names: Sequence[str]) -> list[str]:
    """The names in an order that each capture's own order agrees with, as the longest of them has it."""
    longest = max(orders, key=len, default=[])
    return [*longest, *(name for name in names if name not in longest)]


def _sentences(captures: Sequence[Seen]) -> list[str]:
    lines = []
    for method, seen in captures:
        gpu = seen["gpu"]
        idle, waiting = gpu["idle_ms"], gpu["idle_waiting_for_host_ms"]
        line = f"{method}: the GPU idles {_time(idle)} of {_time(gpu['span_ms'])}"
        line += f", {_time(waiting)} of it waiting for the host" if idle else ""
        if _is_launch_bound(seen):
            line += ": launch-bound"
        lines.append(line + ".")
        if (seconds := gpu["span_ms"] * (seen["steps"] or 1) / 1e3) > LONG_CAPTURE_SECONDS:
            lines.append(f"{method}: the capture is {seconds:.0f} s long, too large to open well: --captured-steps 1.")
    return lines


def _is_launch_bound(seen: dict[str, Any]) -> bool:
    """nsys slows the host, not the kernels: where the step's time without it is known, that decides."""
    gpu, step = seen["gpu"], seen.get("unprofiled_ms")
    if step:
        return bool(gpu["busy_ms"] < BUSY_ENOUGH * step)
    return bool(gpu["span_ms"] and gpu["idle_waiting_for_host_ms"] > LAUNCH_BOUND * gpu["span_ms"])


def _kernel_table(captures: Sequence[Seen]) -> Table:
    table = _table("method", "time", "share", "calls", "mean", text="kernel")
    for method, seen in captures:
        total = seen["kernel_total"]["ms"]
        for number, kernel in enumerate(seen["kernels"][:MOST_KERNELS]):
            share = f"{kernel['ms'] / total:.0%}" if total else MISSING
            mean = _time(kernel["ms"] / kernel["calls"])
            cells = (_time(kernel["ms"]), share, f"{kernel['calls']:,.0f}", mean, kernel["short"])
            table.add_row("" if number else method, *cells)
    return table


def _copy_table(captures: Sequence[Seen]) -> Table:
    table = _table("method", "calls", "bytes", "time", text="what")
    for method, seen in captures:
        memsets = seen["memsets"]
        kinds = [*seen["copies"], *([{"name": "memset", **memsets}] if memsets["calls"] else [])]
        for number, kind in enumerate(kinds):
            moved, time = _size(kind.get("bytes", 0)), _time(kind["ms"])
            table.add_row("" if number else method, f"{kind['calls']:,.1f}", moved, time, kind["name"])
    return table


def _call_table(captures: Sequence[Seen]) -> Table:
    table = _table("method", "calls", "time", text="call")
    for method, seen in captures:
        for number, call in enumerate(seen["api"][:MOST_CALLS]):
            table.add_row("" if number else method, f"{call['calls']:,.0f}", _time(call["ms"]), call["name"])
    return table


def _gap_table(captures: Sequence[Seen]) -> Table:
    table = _table("method", "gap", text="why, in which phase, before which kernel")
    for method, seen in captures:
        for number, gap in enumerate(seen["gaps"][:MOST_GAPS]):
            why = "waiting for the host" if gap["waiting_for_host"] else "between queued work"
            text = f"{why}; {gap['phase']}; {gap['before']}"
            table.add_row("" if number else method, _time(gap["ms"]), text)
    return table


def _table(first: str, *numbers: str, text: str | None = None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    if text is not None:
        table.expand = True  # text takes what numbers leave, and is cut there
        table.add_column(text, no_wrap=True, overflow="ellipsis", ratio=1)
    return table


def _time(ms: float | None) -> str:
    """Kernels are short: below a millisecond microseconds say more."""
    return format_ms(ms) if ms is None or ms >= 1 or ms == 0 else f"{1e3 * ms:.1f} µs"


def _size(count: float) -> str:
    return format_bytes(count) if count >= MIB else f"{count / 2**10:.1f} KiB"


def _notes(captures: Sequence[Seen]) -> list[str]:
    notes = [
        "GPU time: kernels, copies and memsets, by the phase in which they were launched, from whatever thread. Busy: "
        "the share of the time between the first and the last of them. Times under a profiler are not step times.",
    ]
    if any("launch-bound" in line for line in _sentences(captures)):
        notes.append(
            "Launch-bound: the host cannot keep up. Fewer, larger kernels, a larger batch or CUDA graphs help."
        )
    if any(not seen["phases"] for _, seen in captures):
        notes.append("No phases where a capture holds no NVTX ranges of them; then figures are of the whole capture.")
    return notes
