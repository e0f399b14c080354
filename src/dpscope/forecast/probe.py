"""Short steps at small batches on the GPU at hand, and what follows from them for larger ones.

The peak of each phase is a line in the batch size, and the step's peak is the highest of these lines. So each phase is
extrapolated by itself. Step time is a line beyond the batch at which the GPU, and not the host, is the limit.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

import torch

from dpscope.errors import UserError
from dpscope.forecast.cards import CARDS
from dpscope.instruments.timing import CudaClock
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import TrainingSteps
from dpscope.vocabulary.phases import listening

NO_PHASE = "outside"
Say = Callable[[str], None]


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
    """Free unused memory, cuBLAS's workspaces included."""
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


ANSWER = "probed: "
LONGEST_PROBE = 600.0


def local_card() -> str:
    """Return the name of this machine's GPU in the table of cards."""
    if not torch.cuda.is_available():
        raise UserError(
            "--probe measures on a GPU, and there is none here: leave it out for a prediction, or give --gpu"
        )
    properties = torch.cuda.get_device_properties(0)
    gib = properties.total_memory / 2**30
    capability = (properties.major, properties.minor)
    alike = [card for card in CARDS.values() if card.capability == capability and abs(card.memory_gib / gib - 1) < 0.1]
    if not alike:
        raise UserError(
            f"{properties.name} is not in the table of cards: give the nearest one, --gpu {'|'.join(CARDS)}"
        )
    return alike[0].name


def probe_in_processes(spec: RunSpec, batches: Sequence[int], say: Say) -> list[Probe]:
    """Probe a spec at several batches, the smallest first, until one runs out of memory."""
    found: list[Probe] = []
    for batch in batches:
        say(f"{spec.method}: short steps of {batch}")
        answer = _ask(replace(spec, batch_size=batch))
        if isinstance(answer, str):
            if len(found) >= 2:
                break
            raise UserError(f"{spec.method} could not be probed at a batch of {batch}: {answer}")
        found.append(answer)
    return found


def _ask(spec: RunSpec) -> Probe | str:
    """Return a probe, or what kept it from being taken."""
    command = [sys.executable, "-m", "dpscope.forecast.probe", json.dumps(spec.to_dict())]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_PROBE, check=False)
    except subprocess.TimeoutExpired:
        return f"it took more than {LONGEST_PROBE:.0f} s"
    for line in reversed(ended.stdout.splitlines()):
        if line.startswith(ANSWER):
            return Probe(**json.loads(line.removeprefix(ANSWER)))
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"it ended with exit code {ended.returncode}"


def _main() -> None:
    found = probe(RunSpec.from_dict(json.loads(sys.argv[1])))
    print(ANSWER + json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    _main()
