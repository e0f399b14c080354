"""The noise of a loop: the difference of steps with and without it, in one run, in resumed runs and in another run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dpscope.audit.loop import LoopFactory, ObservedStep, RunningLoop, StepFailed
from dpscope.audit.normality import SCIPY_INSTALLED, VALUES_PER_PARAMETER, NoisyStep, find_noise_faults
from dpscope.audit.samples import Samples
from dpscope.audit.verdict import Finding, conclude, not_tried
from dpscope.random_states import RandomStates, all_gpus

MIN_STEPS, MAX_STEPS = 8, VALUES_PER_PARAMETER
TAIL_VALUES = 4096  # of all parameters together: enough to see noise that is cut off at 2.5σ
MAX_ROUNDING_OF_NOISE = 0.02  # of σC, in each value: beyond it, noise cannot be read off the parameters


@dataclass
class NoiseTest:
    factory: LoopFactory
    samples: Samples
    clip_norm: float
    noise_multiplier: float
    batch_size: int
    progress: Callable[[str], None] = lambda _: None
    untried: list[str] = field(default_factory=list)
    without: dict[int, ObservedStep] = field(default_factory=dict)  # by batch size: the noiseless step
    steps: list[NoisyStep] = field(default_factory=list)
    quiet: RunningLoop = field(init=False)  # the loop of steps without noise

    def run(self) -> Finding:
        if not SCIPY_INSTALLED:
            return not_tried("steps", "scipy is not installed: pip install scipy")
        try:
            self._noiseless_steps()
            self._noisy_steps()
        except StepFailed as error:
            return not_tried("steps", str(error))
        if rounding := self._rounding():
            return not_tried("steps", rounding)
        faults = find_noise_faults(self.steps)
        deviation = math.sqrt(sum(step.variance for step in self.steps) / len(self.steps))
        figures = {"standard_deviation_over_sigma_c": deviation}
        return conclude(faults, len(self.steps), "steps", untried=self.untried, figures=figures)

    def _noiseless_steps(self) -> None:
        self.progress("steps without noise")
        self.quiet = loop = self.factory.loop(max_grad_norm=self.clip_norm)
        for size in dict.fromkeys((self.batch_size, 1)):
            self.without[size] = loop.step(self.samples.ordinary_batch(size))
        try:
            self.without[0] = loop.step(self.samples.ordinary_batch(0))
        except StepFailed as error:
            self.untried.append(f"an empty batch: {error}")

    def _noisy_steps(self) -> None:
        """Take a run of steps, runs resumed from a checkpoint in its middle, and a run of another seed."""
        count = self._number_of_steps()
        run, saved = self._new_run(), None
        for index in range(count):
            self.progress(f"noise, step {index + 1} of {count}")
            sizes = [*self.without, 1, 1]
            self._draw(run, f"step {index + 1}", sizes[index % len(sizes)])
            if index + 1 == count // 2:
                saved = self._save(run)
        for number, resumed in enumerate(self._resumed(saved), 1):
            for index in (1, 2):
                self._draw(resumed, f"step {count // 2 + index} after resuming ({number})", 1)
        self._draw(self._new_run(), "step 1 of a run with another seed", 1)

    def _number_of_steps(self) -> int:
        """Return enough steps for `VALUES_PER_PARAMETER` values of each parameter and `TAIL_VALUES` in all."""
        sizes = [self.factory.start[name].numel() for name in self.factory.trainable]
        needed = max(VALUES_PER_PARAMETER / max(1, min(sizes)), TAIL_VALUES / max(1, sum(sizes)))
        return min(MAX_STEPS, max(MIN_STEPS, math.ceil(needed)))

    def _new_run(self) -> RunningLoop:
        return self.factory.loop(max_grad_norm=self.clip_norm, noise_multiplier=self.noise_multiplier)

    def _save(self, run: RunningLoop) -> tuple[Any] | None:
        if run.loop.save is None:
            self.untried.append("resumed runs: the loop does not say how to save and resume")
            return None
        try:
            return (run.loop.save(),)
        except Exception as error:
            self.untried.append(f"resumed runs: saving failed ({type(error).__name__}: {error})")
            return None

    def _resumed(self, saved: tuple[Any] | None) -> list[RunningLoop]:
        """Return two runs that go on from the same checkpoint."""
        runs = []
        for _ in range(2 if saved else 0):
            run = self._new_run()
            assert saved is not None
            if run.loop.resume is None:
                self.untried.append("resumed runs: the loop does not say how to resume")
                return []
            try:
                run.loop.resume(saved[0])
            except Exception as error:
                self.untried.append(f"resumed runs: resuming failed ({type(error).__name__}: {error})")
                return []
            runs.append(run)
        return runs

    def _draw(self, run: RunningLoop, label: str, size: int) -> None:
        batch, before = self.samples.ordinary_batch(size), RandomStates.now(all_gpus())
        noisy, quiet = run.step(batch), self.without[size]
        if self.factory.random:  # the same step once more without noise: what the model draws comes before the noise
            after = RandomStates.now(all_gpus())
            quiet = self.quiet.step(batch, state=before)
            after.put_back()
        unit = self.noise_multiplier * self.clip_norm
        noise = ((n, (noisy.sums[n].double() - quiet.sums[n].double()) / unit) for n in self.factory.trainable)
        self.steps.append(NoisyStep.of(label, size, ((n, z) for n, z in noise if self._trains(n, z))))

    def _trains(self, name: str, noise: Tensor) -> bool:
        """Return whether a parameter trains: one that no sample moves needs no noise."""
        return bool(noise.any()) or any(bool(step.sums[name].any()) for step in self.without.values())

    def _rounding(self) -> str | None:
        scale = self._new_run().loop.scale
        values = sum(p.numel() for p in self.factory.start.values())
        lost = self.factory.rounding(scale) / math.sqrt(values) / (self.noise_multiplier * self.clip_norm)
        if lost <= MAX_ROUNDING_OF_NOISE:
            return None
        return (
            f"noise is lost in the rounding of the parameters ({lost:.2g} of σC): a larger scale, that is, a larger "
            "learning rate, is needed"
        )
