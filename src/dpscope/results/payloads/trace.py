"""Payloads of the instruments `trace` and `nsys`: milliseconds of an average step under a profiler, and their cause."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import NotRequired, TypedDict


class Phase(TypedDict):
    phase: str
    cpu_ms: float
    gpu_ms: float


class Operator(TypedDict):
    """An operator in one phase, without what it calls."""

    operator: str
    phase: str
    count: float
    self_cpu_ms: float
    gpu_ms: float


class Kernel(TypedDict):
    kernel: str
    family: str
    count: float
    ms: float


class Family(TypedDict):
    family: str
    count: float
    ms: float


class NamedWork(TypedDict):
    """Kernels and operators with a word in their names."""

    word: str
    kernels: float
    kernel_ms: float
    operators: float
    operator_cpu_ms: float
    operator_gpu_ms: float


class Synchronisation(TypedDict):
    call: str
    operator: str
    phase: str
    where: str  # a line of Python, where stacks were recorded
    count: float
    ms: float


class Copy(TypedDict):
    kind: str  # HtoD, DtoH, DtoD
    operator: str
    phase: str
    count: float
    bytes: float
    ms: float


class Cast(TypedDict):
    formats: str
    phase: str
    count: float
    cpu_ms: float
    gpu_ms: float


class ModuleTime(TypedDict):
    module: str
    cpu_ms: float
    gpu_ms: float
    phases: NotRequired[dict[str, float]]  # in the time of the trace's basis; not of those that are summed up


class Allocations(TypedDict):
    operator: str
    device: str
    allocations: float
    allocated_bytes: float


class TracedMemory(TypedDict):
    operators: list[Allocations]
    over_time: dict[str, list[tuple[float, int]]]  # by device: milliseconds, bytes


class GpuTime(TypedDict):
    busy_ms: float
    host_busy_ms: NotRequired[float]  # until the host has asked for the last work of a step
    idle_ms: float
    idle_waiting_for_host_ms: float
    idle_between_queued_ms: float
    idle_at_end_ms: float
    overlap_ms: float
    kernels: float
    mean_kernel_us: float


class CollectiveKind(TypedDict):
    collective: str
    count: float
    ms: float


class CollectiveTime(TypedDict):
    """Time of a rank's step in collectives: moving data, or waiting for other ranks."""

    kinds: list[CollectiveKind]
    under_way_ms: float  # at least one of them
    step_ms: float
    exposed_ms: NotRequired[float]  # on a GPU: while nothing else ran on it


class TracedRank(TypedDict):
    """Average step of one rank, where all were traced, and how much of it had a collective under way."""

    rank: int
    step_ms: float
    under_way_ms: float


class TracePayload(TypedDict):
    basis: Literal["gpu", "cpu"]
    steps: int
    step_ms: float
    each_step_ms: list[float]
    phases: list[Phase]
    operators: list[Operator]
    outside_operators_ms: float
    named: list[NamedWork]
    synchronisations: list[Synchronisation]
    casts: list[Cast]
    # Of a trace with a GPU.
    gpu: NotRequired[GpuTime]
    kernels: NotRequired[list[Kernel]]
    families: NotRequired[list[Family]]
    copies: NotRequired[list[Copy]]
    # Of one of several ranks.
    collectives: NotRequired[CollectiveTime]
    ranks: NotRequired[list[TracedRank]]  # where all were traced; the rest is rank 0's
    # Where they were asked for.
    modules: NotRequired[list[ModuleTime]]
    memory: NotRequired[TracedMemory]
    flops: NotRequired[dict[str, float]]
    # How it was recorded, and the size of each file.
    schedule: NotRequired[dict[str, Any]]
    detail: NotRequired[dict[str, Any]]
    files: NotRequired[dict[str, int]]


class CapturedPhase(TypedDict):
    phase: str
    gpu_ms: float
    cpu_ms: float
    idle_ms: float
    kernels: float


class Total(TypedDict):
    calls: float
    ms: float
    bytes: NotRequired[float]


class Named(Total):
    """Copies or calls of one name."""

    name: str


class NamedKernel(Named):
    short: str


class IdleGap(TypedDict):
    """A stretch in which the GPU did nothing, and what ended it."""

    ms: float
    waiting_for_host: bool
    phase: str
    before: str


class CapturedGpu(TypedDict):
    total_ms: float  # of kernels, copies and memsets: more than busy where they overlap
    span_ms: float  # from the first activity to the last
    busy_ms: float
    idle_ms: float
    idle_waiting_for_host_ms: float
    gaps: float
    launch_to_start_us: float | None


class NsysPayload(TypedDict):
    """Payload of a capture; a row that failed has only the first three keys."""

    nsys_version: NotRequired[str]
    command: NotRequired[list[str]]
    foreign_variables: NotRequired[list[str]]  # of other processes, which nsys wrote into its report
    steps: int | None  # None: no range says what a step is, and figures are of the whole capture
    phases: list[CapturedPhase]
    gpu: CapturedGpu
    gaps: list[IdleGap]
    kernels: list[NamedKernel]
    kernel_total: Total
    copies: list[Named]
    memsets: Total
    api: list[Named]
