"""Short steps at small batches on the GPU at hand, and what follows from them for larger ones.

The peak of each phase of a step is a line in the batch size, because what a phase holds is either independent of the
batch or proportional to it; the step's peak is the highest of these lines. So each phase is extrapolated by itself: a
phase that is low at small batches may be the highest at large ones. Step time is a line beyond the batch from which the
GPU, and not the host, is what a step waits for.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from dpscope.instruments.timing import CudaClock
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import TrainingSteps
from dpscope.vocabulary.phases import listening

NO_PHASE = "outside"


@dataclass(frozen=True)
class Probe:
    """Peaks and times of steps of one batch size. Peaks are of requested bytes, which are linear in the batch."""

    batch_size: int
    peak_bytes: int
    seconds: float
    phases: dict[str, int] = field(default_factory=dict)  # the peak of each
    rounding: int = 0  # bytes that the allocator hands out beyond what is asked for


@dataclass(frozen=True)
class Extrapolation:
    peak_bytes: int
    seconds: float


def probe(spec: RunSpec, *, steps: int = 4, warmup: int = 3) -> Probe:
    """Take a few steps of a spec on this GPU. What they allocate is freed before this returns."""
    torch.cuda.reset_peak_memory_stats()
    base = int(torch.cuda.memory_stats().get("requested_bytes.all.current", 0))
    training = TrainingSteps(replace(spec, device="cuda"), warmup=warmup)
    try:
        training.warm_up()
        clock = CudaClock()
        clock.mark()
        for _ in range(steps):
            training()
            clock.mark()
        seconds = statistics.median(clock.intervals_ms()) / 1e3
        training.require_finite_losses()
        peak = _peak() - base
        allocated = torch.cuda.max_memory_allocated() - base
        peaks = _PhasePeaks()
        with listening(peaks.phase):
            training()
        torch.cuda.synchronize()
        training.require_finite_losses()
        phases = {name: most - base for name, most in peaks.found.items()}
        return Probe(spec.batch_size, peak, seconds, phases, allocated - peak)
    finally:
        del training
        free_memory()


def free_memory() -> None:
    """Give back what nothing holds any more, cuBLAS's workspaces among it."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _peak() -> int:
    return int(torch.cuda.memory_stats().get("requested_bytes.all.peak", 0))


class _PhasePeaks:
    """The allocator's peak in each phase, and between them."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self._open: list[str] = []
        torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._note()
        self._open.append(name)
        try:
            yield
        finally:
            self._note()
            self._open.pop()

    def _note(self) -> None:
        name = self._open[-1] if self._open else NO_PHASE
        self.found[name] = max(self.found.get(name, 0), _peak())
        torch.cuda.reset_peak_memory_stats()


def extrapolate(probes: Sequence[Probe], batch_size: int) -> Extrapolation:
    """Predict the peak and the step time of another batch size from two probes or more."""
    ordered = sorted(probes, key=lambda each: each.batch_size)
    low, high = ordered[-2:]
    names = [name for name in high.phases if name in low.phases]
    peaks = [_line(low, high, low.phases[name], high.phases[name], batch_size) for name in names]
    whole = _line(low, high, low.peak_bytes, high.peak_bytes, batch_size)
    # Steps before the last have peaks as well, such as rehearsals and the first update.
    peak = max([*peaks, whole if high.peak_bytes > max(high.phases.values(), default=0) else 0])
    seconds = max(_line(low, high, low.seconds, high.seconds, batch_size), high.seconds)
    return Extrapolation(round(peak) + high.rounding, seconds)


def _line(low: Probe, high: Probe, at_low: float, at_high: float, batch_size: int) -> float:
    slope = (at_high - at_low) / (high.batch_size - low.batch_size)
    return at_high + max(0.0, slope) * (batch_size - high.batch_size)
