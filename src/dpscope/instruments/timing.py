"""The time instrument: CUDA events read after one final synchronisation, or a monotonic clock on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from dpscope.results.payloads.memory import TimingPayload
from dpscope.units import spread_of

Step = Callable[[], object]
Progress = Callable[[str, int, int], None]  # (stage, done, total)


def no_progress(stage: str, done: int, total: int) -> None:
    """Report nothing."""


class CpuClock:
    """Clock that marks moments while steps run, and turns them into milliseconds afterwards."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._marks: list[float] = []

    def mark(self) -> None:
        self._marks.append(self._now())

    def intervals_ms(self) -> list[float]:
        return [1e3 * (b - a) for a, b in pairwise(self._marks)]


class CudaClock:
    """Clock of the GPU, read through events."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda
        self._marks: list[torch.cuda.Event] = []
        torch.cuda.synchronize()

    def mark(self) -> None:
        event = self._cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def intervals_ms(self) -> list[float]:
        self._cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(self._marks)]


@dataclass(frozen=True)
class Timing:
    """The time of every step in milliseconds, and their statistics."""

    step_ms: list[float]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    def to_dict(self) -> TimingPayload:
        low, high = spread_of(self.step_ms)
        return {
            "step_ms": self.step_ms,
            "median_ms": self.median_ms,
            "p10_ms": low,
            "p90_ms": high,
            "mean_ms": statistics.fmean(self.step_ms),
        }


def time_steps(step: Step, *, device: str, warmup: int, steps: int, progress: Progress = no_progress) -> Timing:
    """Run `warmup` steps that are not counted, then `steps` that are."""
    for done in range(warmup):
        step()
        progress("warm-up", done + 1, warmup)
    clock: CudaClock | CpuClock = CudaClock() if device == "cuda" else CpuClock()
    clock.mark()
    for done in range(steps):
        step()
        clock.mark()
        progress("step", done + 1, steps)
    return Timing(clock.intervals_ms())
