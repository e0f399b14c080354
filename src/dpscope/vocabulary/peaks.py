"""The ways in which a peak of memory is measured: their names in result files, and what reports say of each."""

from __future__ import annotations

TRACKER, COMPILED = "tracker", "compiled"
CUDA_ALLOCATOR, CPU_ALLOCATOR = "cuda_allocator", "cpu_allocator"

# One table shows peaks of one of them.
PEAK_SOURCES = {
    TRACKER: "of one step after warm-up; its parts from one more step whose every storage was tracked",
    COMPILED: (
        "of a compiled row, the allocator's of steps after compilation; its parts are what is there before a step, and "
        "what a compiled step makes is unattributed"
    ),
    CUDA_ALLOCATOR: "the CUDA allocator's peak of allocated bytes over the whole run",
    CPU_ALLOCATOR: (
        "live tensors at their peak during one step, from torch's CPU allocator (a step after the timed ones)"
    ),
}
