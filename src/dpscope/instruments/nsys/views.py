"""Five views of a captured timeline, as data frames, and `lanes` for `draw_capture` (docs/nsys.md).

Times are milliseconds from the first event of the capture.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING, Any

from dpscope.instruments.families import kernel_family, short_kernel_name
from dpscope.instruments.nsys.reading import KERNEL, MEMCPY, CapturedTimeline
from dpscope.instruments.nsys.summary import summarise_timeline

if TYPE_CHECKING:
    from pandas import DataFrame

RANGE_EVENT, CALL_EVENT, WAIT_EVENT = "range", "call", "wait"  # kinds of events beside kernels, copies and memsets
SHORT_KERNEL_NS = 10_000  # about what a launch costs: the host cannot keep the GPU busy with shorter ones
# How a library names its kernels. The first that fits decides; what fits none is torch's own or the user's.
KERNEL_LIBRARIES = (
    ("cuBLAS", ("nvjet", "cublas", "gemm", "gemv", "splitKreduce", "xmma")),
    ("cuDNN", ("cudnn", "convolve", "dgrad", "wgrad")),
    ("attention", ("flash_fwd", "flash_bwd", "fmha", "pytorch_flash")),
    ("torch", ("at::", "elementwise", "reduce_kernel", "multi_tensor_apply", "Functor")),
)


def gpu_timeline(timeline: CapturedTimeline) -> DataFrame:
    """Return a row a kernel, copy or memset in order of time: which stream, when, how long, how many bytes."""
    import pandas as pd

    began = beginning(timeline)
    return pd.DataFrame(
        {
            "stream": activity.stream,
            "kind": activity.kind,
            "what": short_kernel_name(activity.name) if activity.kind == KERNEL else activity.name,
            "start_ms": (activity.start - began) / 1e6,
            "ms": (activity.end - activity.start) / 1e6,
            "bytes": activity.bytes,
        }
        for activity in timeline.activities
    )


def host_and_gpu(timeline: CapturedTimeline) -> DataFrame:
    """Return the host's CUDA calls by name: number, total time, and whether they wait for the GPU."""
    calls = ({"call": c.name, "waits": is_waiting(c.name), "ms": (c.end - c.start) / 1e6} for c in timeline.calls)
    return _by_time(calls, "call", "waits")


def _by_time(rows: Iterable[dict[str, Any]], *keys: str) -> DataFrame:
    """Add up calls and milliseconds, the longest first."""
    import pandas as pd

    grouped = pd.DataFrame(rows).groupby(list(keys), as_index=False).agg(calls=("ms", "size"), ms=("ms", "sum"))
    return grouped.sort_values("ms", ascending=False, ignore_index=True)


def is_waiting(call: str) -> bool:
    """Return whether a call, by its name, returns only when the GPU has caught up."""
    return "Synchronize" in call or call in ("cudaMemcpy", "cudaFree", "cudaFreeHost")


def levels(timeline: CapturedTimeline) -> dict[str, float]:
    """Return busy shares in percent and lengths in microseconds, from the whole capture down to a launch."""
    seen = summarise_timeline(timeline)
    gpu = seen["gpu"]
    kernels = [a.end - a.start for a in timeline.activities if a.kind == KERNEL]
    launches = [c.end - c.start for c in timeline.calls if "Launch" in c.name]
    found = {
        "GPU busy, % of the capture": 100 * gpu["busy_ms"] / gpu["span_ms"],
        "GPU idle for want of a launch, % of the capture": 100 * gpu["idle_waiting_for_host_ms"] / gpu["span_ms"],
        "kernels": float(len(kernels)),
        "kernels shorter than 10 µs, %": 100 * sum(k < SHORT_KERNEL_NS for k in kernels) / max(len(kernels), 1),
    }
    if kernels:
        found["median kernel, µs"] = median(kernels) / 1e3
    if launches:
        found["median launch on the host, µs"] = median(launches) / 1e3
    if gpu["launch_to_start_us"] is not None:
        found["median from launch to start, µs"] = gpu["launch_to_start_us"]
    return found


def link(timeline: CapturedTimeline) -> DataFrame:
    """Return the copies by direction and kind of host memory: bytes, and bytes a second while they ran."""
    import pandas as pd

    copies = [a for a in timeline.activities if a.kind == MEMCPY]
    rows = pd.DataFrame(
        {
            "direction": [a.name for a in copies],
            "host_memory": ["none" if "Host" not in a.name else "pageable" if a.pageable else "pinned" for a in copies],
            "bytes": [a.bytes for a in copies],
            "ms": [(a.end - a.start) / 1e6 for a in copies],
        }
    )
    grouped = rows.groupby(["direction", "host_memory"], as_index=False).agg(
        copies=("bytes", "size"), bytes=("bytes", "sum"), ms=("ms", "sum")
    )
    return grouped.assign(gb_per_second=grouped["bytes"] / grouped["ms"] / 1e6)


def libraries(timeline: CapturedTimeline) -> DataFrame:
    """Return the kernels by the library they come from and by family: calls and milliseconds."""
    kernels = [a for a in timeline.activities if a.kind == KERNEL]
    rows = []
    for a in kernels:
        known = (library for library, marks in KERNEL_LIBRARIES if any(mark in a.name for mark in marks))
        rows.append({"library": next(known, "other"), "family": kernel_family(a.name), "ms": (a.end - a.start) / 1e6})
    return _by_time(rows, "library", "family")


def lanes(timeline: CapturedTimeline) -> DataFrame:
    """Return every event with the lane it is drawn in: NVTX ranges by depth, CUDA calls, and each stream of the GPU."""
    import pandas as pd

    depths = nesting([(r.start, r.end) for r in timeline.ranges])
    levels_of = zip(timeline.ranges, depths, strict=True)
    ranges = [(f"NVTX {depth + 1}", RANGE_EVENT, r.name, r.start, r.end) for r, depth in levels_of]
    kinds = (WAIT_EVENT if is_waiting(call.name) else CALL_EVENT for call in timeline.calls)
    calls = [("CUDA calls", kind, c.name, c.start, c.end) for c, kind in zip(timeline.calls, kinds, strict=True)]
    work = [(f"stream {a.stream}", a.kind, a.name, a.start, a.end) for a in timeline.activities]
    streams = sorted(work, key=lambda event: int(event[0].split()[1]))
    events = [*sorted(ranges, key=lambda event: event[0]), *calls, *streams]
    table = pd.DataFrame(events, columns=["lane", "kind", "name", "start", "end"])
    start_ms, ms = (table["start"] - beginning(timeline)) / 1e6, (table["end"] - table["start"]) / 1e6
    return table.drop(columns=["start", "end"]).assign(start_ms=start_ms, ms=ms)


def nesting(spans: Iterable[tuple[int, int]]) -> list[int]:
    """Return how many earlier spans are still open at the start of each; spans are sorted by start."""
    open_until: list[int] = []
    depths = []
    for start, end in spans:
        depth = next((lane for lane, until in enumerate(open_until) if until <= start), len(open_until))
        open_until[depth : depth + 1] = [end]
        depths.append(depth)
    return depths


def beginning(timeline: CapturedTimeline) -> int:
    """Return the first moment of a capture, in its own nanoseconds."""
    return min(each[0].start for each in (timeline.activities, timeline.calls, timeline.ranges) if each)
