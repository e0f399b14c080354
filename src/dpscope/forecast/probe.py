"""Short steps on the GPU at hand, and what they say about larger batches.

A step is predicted at the probed sizes too, and the errors there correct the prediction for another size. The error of
the peak is linear in the batch size, with one line for steps and one for verification. Its time has two parts. The
GPU's busy time, recorded by a profiler, grows as predicted even if the step waits for the host. The host's part is the
time of steps in which the GPU waits. It is the same for all sizes.
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

from dpscope.errors import UserError
from dpscope.flash.sample_rows.schedule import SMALL_BATCH
from dpscope.forecast.cards import CARDS
from dpscope.forecast.step import StepForecast
from dpscope.forecast.work import slower_of
from dpscope.instruments.timing import CudaClock
from dpscope.instruments.trace.attribution import busy_seconds
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import TrainingSteps
from dpscope.vocabulary.components import UNATTRIBUTED

LEAST_ROUNDS, MOST_ROUNDS = 2, 10
TIMING_SECONDS = 4.0  # after which no further round begins
ROUND_SECONDS, MOST_TIMED = 0.15, 4  # of a training's timed steps in a round
WAITING = 1.2  # step time over the GPU's busy time from which on the GPU waits for the host
GAP_SECONDS = 4e-6  # between two kernels where the host is ahead: 0 to 8 µs on H200s
Say = Callable[[str], None]


@dataclass(frozen=True)
class Probe:
    """Measured steps of one batch size: peak of allocated bytes, median time, and the GPU's busy time."""

    batch_size: int
    peak_bytes: int  # of the first steps, in which flash clipping verifies the model
    seconds: float
    gpu_seconds: float


def probe(specs: Sequence[RunSpec]) -> list[Probe]:
    """Take a few steps of each spec on this GPU. What they allocate is freed before this returns.

    The host's pace changes within seconds, so all are trained in turn, if the GPU has room for them together.
    """
    free_memory()  # what is freed while a step is watched would make its peak too low
    try:
        return _probe(specs)
    except torch.OutOfMemoryError:
        if len(specs) == 1:
            raise
    finally:
        free_memory()
    return [probe([spec])[0] for spec in specs]


def _probe(specs: Sequence[RunSpec]) -> list[Probe]:
    trainings = [_Training(replace(spec, device="cuda")) for spec in specs]
    gc.collect()
    gc.disable()  # it would stop some of the steps, and not others
    try:
        begin = time.perf_counter()
        for number in range(MOST_ROUNDS):
            if number >= LEAST_ROUNDS and time.perf_counter() - begin > TIMING_SECONDS:
                break
            for each in trainings:
                each.time_steps()
        return [each.probe() for each in trainings]
    finally:
        gc.enable()


def _warmup(spec: RunSpec) -> int:
    """Return how many steps to take before the peak is read."""
    if spec.method != "flash":
        return 3
    # Until flash clipping has made its self-test once more, when the optimizer has its state.
    return 4 if spec.batch_size >= SMALL_BATCH else 8


class _Training:
    """Training whose first steps are done, in turn with others."""

    def __init__(self, spec: RunSpec) -> None:
        torch._C._cuda_clearCublasWorkspaces()  # each training makes its own
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        self._steps = TrainingSteps(spec, warmup=_warmup(spec))
        self._steps.warm_up()
        begin = time.perf_counter()
        self._steps()
        self._steps.require_finite_losses()  # which waits for the device
        self._about_seconds = time.perf_counter() - begin
        self._batch_size = spec.batch_size
        self._peak_bytes = torch.cuda.max_memory_allocated() - base
        self._intervals: list[float] = []
        self._let_go()

    def _let_go(self) -> None:
        self._steps.trainer.optimizer.zero_grad(set_to_none=True)

    def time_steps(self) -> None:
        """Time a few steps, after one during which the host gets ahead of the GPU."""
        self._steps()
        clock = CudaClock()
        clock.mark()
        for _ in range(max(1, min(MOST_TIMED, int(ROUND_SECONDS / self._about_seconds)))):
            self._steps()
            clock.mark()
        self._intervals += clock.intervals_ms()
        self._steps.require_finite_losses()
        self._let_go()

    def probe(self) -> Probe:
        seconds = statistics.median(self._intervals) / 1e3
        busy = busy_seconds(self._steps)
        self._let_go()
        return Probe(self._batch_size, self._peak_bytes, seconds, min(busy or seconds, seconds))


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

    def missed_bytes(self, step: StepForecast, batch_size: int) -> int:
        """Return how far a peak is above its prediction: interpolated between probes, extrapolated beyond them.

        Only probes that peak in the same place count: in verification, or in a step. An error that shrinks with the
        batch, or was tiny at the smaller size, is not extrapolated.
        """
        pairs = zip(self.probes, self.forecasts, strict=True)
        alike = [(each, guess) for each, guess in pairs if guess.peaks_verifying == step.peaks_verifying]
        sizes = [each.batch_size for each, _ in alike]
        misses = [each.peak_bytes - guess.peak_bytes for each, guess in alike]
        if not sizes:
            return 0
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

    @property
    def gap_seconds(self) -> float:
        """Time between two kernels in steps in which the GPU does not wait for the host."""
        probed, predicted = self.probes[-1], self.forecasts[-1]
        if self.host_seconds:
            return GAP_SECONDS
        return (probed.seconds - probed.gpu_seconds) / max(predicted.kernels, 1)

    def __call__(self, step: StepForecast, batch_size: int) -> StepForecast:
        """Return a prediction of another size, corrected."""
        probed, predicted, host = self.probes[-1], self.forecasts[-1], self.host_seconds
        if predicted.host_seconds:
            host *= step.host_seconds / predicted.host_seconds  # of a step that has more passes
        busy = probed.gpu_seconds * step.gpu_seconds / predicted.gpu_seconds
        busy = min(busy + step.kernels * self.gap_seconds, WAITING * busy)
        missed = self.missed_bytes(step, batch_size)
        return replace(
            step,
            peak_bytes=step.peak_bytes + missed,
            step_bytes=step.step_bytes + (0 if step.peaks_verifying else missed),
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
    """Probe a spec at several batches in a process of its own, without those that run out of memory."""
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
    specs = [replace(RunSpec.from_dict(json.loads(spec)), batch_size=int(size)) for size in sizes]
    while specs:
        try:
            found = probe(specs)
        except torch.OutOfMemoryError:
            specs.pop()  # the largest
            continue
        for each in found:
            print(ANSWER + json.dumps(asdict(each)), flush=True)
        return


if __name__ == "__main__":
    _main()
