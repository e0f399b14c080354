"""Payload of the instrument `nsys`: milliseconds, calls and bytes of an average step of Nsight Systems."""

from __future__ import annotations

from typing_extensions import NotRequired, TypedDict


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
    gpu_name: str | None
    steps: int | None  # None: no range says what a step is, and figures are of the whole capture
    phases: list[CapturedPhase]
    gpu: CapturedGpu
    gaps: list[IdleGap]
    kernels: list[NamedKernel]
    kernel_total: Total
    copies: list[Named]
    memsets: Total
    api: list[Named]
    os_calls: list[Named]
