"""Payloads of the instruments `time` and `memory`: milliseconds of steps, bytes by component, figures by rank.

1 MB = 2^20 bytes.
"""

from __future__ import annotations

from typing_extensions import NotRequired, TypedDict

OTHER_MODULES = "(other)"  # all modules that are too light to be listed, together

Components = dict[str, int]  # component -> bytes; only `unattributed` may be below zero


class CompilationPayload(TypedDict):
    """Work of torch.compile for a row."""

    seconds: float  # of the steps in which it compiled, before warm-up; with an empty cache
    graphs: int
    graph_breaks: int
    recompiles: int  # graphs that were compiled during the timed steps


class TurnsPayload(TypedDict):
    """Blocks of steps that were timed in turns with ordinary training, in one process."""

    ratios: list[float]  # of the medians of two neighbouring blocks, to ordinary training's
    steps: int  # of a block


class TimingPayload(TypedDict, total=False):
    compilation: NotRequired[CompilationPayload]
    in_turns: NotRequired[TurnsPayload]  # of rows that are host-bound
    step_ms: list[float]
    median_ms: float
    p10_ms: float
    p90_ms: float
    mean_ms: float


class Peak(TypedDict):
    """The moment at which the most bytes were live, the tensor made then, and the components of the peak."""

    phase: str
    operator: str
    module: str
    components: Components


class ModuleAtPeak(TypedDict):
    module: str
    components: Components


class TensorAtPeak(TypedDict):
    """Group of `count` tensors that differ only in the number of their layer."""

    bytes: int  # of one
    count: int
    shape: list[int]
    dtype: str
    component: str
    module: str
    phase: str
    operator: str  # empty for what was there before the step
    line: str  # `model.py:12 forward`, or nothing
    by_autograd: bool  # made in a backward pass, for that line of the forward pass


class OtherTensors(TypedDict):
    """Sum of all tensors that are not listed."""

    bytes: int
    count: int


class TensorsAtPeak(TypedDict):
    largest: list[TensorAtPeak]
    rest: OtherTensors


class Remainder(TypedDict):
    """A part of the allocator's total that was not tracked."""

    what: str
    bytes: int


class MemoryPayload(TypedDict, total=False):
    source: str  # how the peak was measured: a key of `PEAK_SOURCES` in vocabulary/components.py
    peak_bytes: int
    peak_allocated_bytes: int  # of the CUDA allocator, with the next three
    peak_reserved_bytes: int
    peak_requested_bytes: int
    cublas_workspace_bytes: int
    live_before_step_bytes: int  # of the CPU allocator, with the next two
    allocator_peak_bytes: int
    peak_rss_bytes: int | None
    tracked_peak_bytes: int  # of the tracker, with all that follows
    peak: Peak
    modules: list[ModuleAtPeak]
    tensors: TensorsAtPeak
    unattributed: list[Remainder]


class TimelinePhase(TypedDict):
    """Phase of a timeline, from one event to another."""

    name: str
    start: int
    end: int


class TimelinePayload(TypedDict, total=False):
    unit: str
    event: str
    components: list[str]
    points: list[list[int]]  # an event, and live bytes of each component after it
    phases: list[TimelinePhase]
    peak: int  # which point


class Snapshot(TypedDict):
    name: str
    allocated_mb: float
    reserved_mb: NotRequired[float]
    timestamp: NotRequired[float]


class Collective(TypedDict):
    """One kind of collective in a step, as rank 0 calls it."""

    calls: int
    bytes: int  # of the larger side, input or output
    sent_bytes: int  # by one rank, by the ring algorithm


class Link(TypedDict):
    """Sending time of a simulated rank at a stated bandwidth, computed and not measured."""

    gbps: float  # Gbit/s of one rank's link
    send_ms: float


class RanksPayload(TypedDict):
    simulated: bool  # one rank without the others: collectives return at once
    time_ms: list[float]  # median of a step, by rank
    peak_bytes: list[int]  # by rank
    collectives: dict[str, Collective]  # by name
    collective_share: NotRequired[list[float]]  # by rank: of a profiled step, how much had a collective under way
    link: NotRequired[Link]  # of a simulated world
