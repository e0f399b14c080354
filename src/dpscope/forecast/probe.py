"""Short steps on the GPU at hand, and what they say about larger batches.

A step is predicted at the probed sizes too, and the errors there correct the prediction for another size. The error of
the peak is linear in the batch size. Its time has two parts. The GPU's busy time, recorded by a profiler, grows as
predicted even if the step waits for the host. The host's part is the time of steps in which the GPU waits. It is the
same for all sizes.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from dpscope.errors import UserError
from dpscope.forecast.cards import CARDS
from dpscope.forecast.step import StepForecast
from dpscope.forecast.work import slower_of
from dpscope.instruments.timing import CudaClock
from dpscope.instruments.trace.attribution import union
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import TrainingSteps
from dpscope.vocabulary.components import UNATTRIBUTED

LEAST_TIMED, MOST_TIMED = 5, 20  # steps
ENOUGH = 1.0  # seconds of steps
WAITING = 1.2  # step time over the GPU's busy time from which on the GPU waits for the host
Say = Callable[[str], None]


@dataclass(frozen=True)
class Probe:
    """Measured steps of one batch size: peak of allocated bytes, median time, and the GPU's busy time."""

    batch_size: int
    peak_bytes: int
    seconds: float
    gpu_seconds: float


def probe(spec: RunSpec, *, warmup: int = 3) -> Probe:
    """Take a few steps of a spec on this GPU. What they allocate is freed before this returns."""
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    training = TrainingSteps(replace(spec, device="cuda"), warmup=warmup)
    try:
        training.warm_up()
        training()
        training.require_finite_losses()  # which waits for the device
        peak = torch.cuda.max_memory_allocated() - base
        gc.collect()
        gc.disable()  # it would stop some of the steps, and not others
        seconds = _seconds(training)
        training.require_finite_losses()
        busy = _busy_seconds(training)
        return Probe(spec.batch_size, peak, seconds, min(busy or seconds, seconds))
    finally:
        gc.enable()
        del training
        free_memory()


def _seconds(step: Callable[[], object]) -> float:
    clock = CudaClock()
    begin = time.perf_counter()
    clock.mark()
    for done in range(MOST_TIMED):
        if done >= LEAST_TIMED and time.perf_counter() - begin > ENOUGH:
            break
        step()
        clock.mark()
    return statistics.median(clock.intervals_ms()) / 1e3


def _busy_seconds(step: Callable[[], object]) -> float:
    """Return the total time of a step's kernels and copies; 0 if the profiler sees none."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    recorded = getattr(profiler.profiler, "kineto_results", None)
    ran = [] if recorded is None else [each for each in recorded.events() if each.device_type().name == "CUDA"]
    covered = union((each.start_ns(), each.start_ns() + each.duration_ns()) for each in ran)
    return sum(end - start for start, end in covered) / 1e9


def free_memory() -> None:
    """Free unused memory, cuBLAS's workspaces included."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@dataclass(frozen=True)
class Correction:
    """Errors of predictions at probed sizes, smallest first."""

    probes: Sequence[Probe]
    forecasts: Sequence[StepForecast]  # of the same sizes

    def missed_bytes(self, batch_size: int) -> int:
        """Return how far a peak is above its prediction: interpolated between probes, extrapolated beyond them.

        An error that shrinks with the batch, or was tiny at the smaller size, comes from one size only and is not
        extrapolated.
        """
        sizes = [each.batch_size for each in self.probes]
        misses = [each.peak_bytes - step.peak_bytes for each, step in zip(self.probes, self.forecasts, strict=True)]
        if batch_size < sizes[-1]:
            return round(np.interp(batch_size, sizes, misses))
        grows = len(sizes) > 1 and 0.9 * sizes[-2] / sizes[-1] < misses[-2] / (misses[-1] or 1) < 1
        slope = (misses[-1] - misses[-2]) / (sizes[-1] - sizes[-2]) if grows else 0.0
        return round(misses[-1] + slope * (batch_size - sizes[-1]))

    @property
    def host_seconds(self) -> float:
        """Time of the steps in which the GPU waits for the host; 0 without such."""
        waiting = [each.seconds for each in self.probes if each.seconds > WAITING * each.gpu_seconds]
        return statistics.median(waiting) if waiting else 0.0

    def __call__(self, step: StepForecast, batch_size: int) -> StepForecast:
        """Return a prediction of another size, corrected."""
        probed, predicted, host = self.probes[-1], self.forecasts[-1], self.host_seconds
        gaps = min(max(probed.seconds / slower_of(probed.gpu_seconds, host), 1.0), WAITING)  # between kernels
        busy = gaps * probed.gpu_seconds * step.gpu_seconds / predicted.gpu_seconds
        missed = self.missed_bytes(batch_size)
        return replace(
            step,
            peak_bytes=step.peak_bytes + missed,
            components={**step.components, UNATTRIBUTED: step.components.get(UNATTRIBUTED, 0) + missed},
            seconds=slower_of(busy, host),
            gpu_seconds=busy,
            host_seconds=host,
        )


ANSWER = "probed: "
LONGEST_PROBE = 600.0


def local_card(named: str | None = None) -> str:
    """Return the name of this machine's GPU in the table of cards, or the given replacement."""
    if not torch.cuda.is_available():
        raise UserError("--probe measures on a GPU, and there is none here: leave it out for a prediction")
    if named is not None:
        return named
    properties = torch.cuda.get_device_properties(0)
    gib = properties.total_memory / 2**30
    capability = (properties.major, properties.minor)
    alike = [card for card in CARDS.values() if card.capability == capability and abs(card.memory_gib / gib - 1) < 0.1]
    if not alike:
        raise UserError(
            f"{properties.name} is not in the table of cards: give the nearest one, --gpu {'|'.join(CARDS)}"
        )
    return alike[0].name


def probe_in_process(spec: RunSpec, batches: Sequence[int], say: Say) -> list[Probe]:
    """Probe a spec at several batches in a process of its own, the smallest first, until one runs out of memory."""
    sizes = sorted(set(batches))
    say(f"{spec.method}: short steps of {', '.join(map(str, sizes))}")
    command = [sys.executable, "-m", "dpscope.forecast.probe", json.dumps(spec.to_dict()), *map(str, sizes)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_PROBE, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"{spec.method} could not be probed: it took more than {LONGEST_PROBE:.0f} s") from None
    lines = [line for line in ended.stdout.splitlines() if line.startswith(ANSWER)]
    if not lines:
        said = [line for line in ended.stderr.splitlines() if line.strip()] or [f"exit code {ended.returncode}"]
        raise UserError(f"{spec.method} could not be probed at a batch of {sizes[0]}: {said[-1][:300]}")
    return [Probe(**json.loads(line.removeprefix(ANSWER))) for line in lines]


def _main() -> None:
    spec, *sizes = sys.argv[1:]
    for size in sizes:
        found = probe(replace(RunSpec.from_dict(json.loads(spec)), batch_size=int(size)))
        print(ANSWER + json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    _main()
