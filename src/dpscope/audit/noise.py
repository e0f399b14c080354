"""The noise of a loop and its accountant.

Noise is the difference of steps with and without it, in one run, in resumed runs and in another run. The accountant
has to count every step, empty batches too, at the right rate and noise. Accountants assume that a loader draws each
sample with the sample rate, independently (Poisson). This is tested on the indices of many draws. Each test of them
raises a false alarm with a probability of at most `UNLIKELY`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

from dpscope.audit.loop import LoopFactory, ObservedStep, RunningLoop, StepFailed
from dpscope.audit.normality import SCIPY_INSTALLED, VALUES_PER_PARAMETER, NoisyStep, find_noise_faults
from dpscope.audit.samples import Samples
from dpscope.audit.verdict import Finding, conclude, not_tried
from dpscope.batches import batch_size_of
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

    @property
    def unit(self) -> float:
        """σC."""
        return self.noise_multiplier * self.clip_norm

    def run(self) -> Finding:
        if not SCIPY_INSTALLED:
            return not_tried("steps", "scipy is not installed: pip install scipy")
        try:
            self.progress("steps without noise")
            self.quiet = loop = self.factory.loop(max_grad_norm=self.clip_norm)
            for size in dict.fromkeys((self.batch_size, 1)):
                self.without[size] = loop.step(self.samples.ordinary_batch(size))
            try:
                self.without[0] = loop.step(self.samples.ordinary_batch(0))
            except StepFailed as error:
                self.untried.append(f"an empty batch: {error}")
            self._noisy_steps()
        except StepFailed as error:
            return not_tried("steps", str(error))
        values = sum(p.numel() for p in self.factory.start.values())
        lost = self.factory.rounding(self.quiet.loop.scale) / math.sqrt(values) / self.unit
        if lost > MAX_ROUNDING_OF_NOISE:
            why = (
                f"noise is lost in the rounding of the parameters ({lost:.2g} of σC): a larger scale, that is, a "
                "larger learning rate, is needed"
            )
            return not_tried("steps", why)
        faults = find_noise_faults(self.steps)
        deviation = math.sqrt(sum(step.variance for step in self.steps) / len(self.steps))
        figures = {"standard_deviation_over_sigma_c": deviation}
        return conclude(faults, len(self.steps), "steps", untried=self.untried, figures=figures)

    def _noisy_steps(self) -> None:
        """Take a run of steps, runs resumed from a checkpoint in its middle, and a run of another seed."""
        # Enough for `VALUES_PER_PARAMETER` values of each parameter and `TAIL_VALUES` in all.
        values = [self.factory.start[name].numel() for name in self.factory.trainable]
        needed = max(VALUES_PER_PARAMETER / max(1, min(values)), TAIL_VALUES / max(1, sum(values)))
        count = min(MAX_STEPS, max(MIN_STEPS, math.ceil(needed)))
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
        noise = ((n, (noisy.sums[n].double() - quiet.sums[n].double()) / self.unit) for n in self.factory.trainable)
        # A parameter that no sample moves needs no noise.
        quiet_steps = self.without.values()
        needed = ((n, z) for n, z in noise if z.any() or any(step.sums[n].any() for step in quiet_steps))
        self.steps.append(NoisyStep.of(label, size, needed))


UNLIKELY = 1e-9
DRAWS_TRIED = 256  # at most
MAX_SAMPLED = 2**22  # samples in all of them together
USE_POISSON = "use the loader that make_private returns (poisson_sampling=True), or account for what this one does"

Indices = Sequence[int]


def find_sampling_faults(loader: Any, sample_rate: float | None) -> Iterator[str]:
    """Return a sentence on how the loader's draws differ from Poisson sampling at this rate; nothing if they do not."""
    draws = _draws(loader)
    samples = len(loader.dataset)
    rate = sample_rate or sum(map(len, draws)) / max(1, samples * len(draws))
    if len(draws) < 2 or not samples:
        return
    if sentence := next(_sentences(draws, samples, min(1.0, rate)), None):
        yield f"batches are not drawn by Poisson sampling, which the accountant assumes: {sentence}; {USE_POISSON}"


def _draws(loader: Any) -> list[Indices]:
    """Return the indices of batches over several epochs; without a batch sampler, only their numbers of samples."""
    found: list[Indices] = []
    sampler = getattr(loader, "batch_sampler", None)
    while len(found) < DRAWS_TRIED:
        before = len(found)
        for draw in islice(loader if sampler is None else sampler, DRAWS_TRIED - before):
            found.append(range(-batch_size_of(draw), 0) if sampler is None else [int(i) for i in draw if i >= 0])
        if len(found) == before or sum(map(len, found)) > MAX_SAMPLED:
            break
    return found


def _sentences(draws: Sequence[Indices], samples: int, rate: float) -> Iterator[str]:
    from scipy import stats  # type: ignore[import-untyped]

    sizes = [len(draw) for draw in draws]
    mean = sum(sizes) / len(sizes)
    knows_samples = all(not isinstance(draw, range) for draw in draws)
    if knows_samples and any(len(set(draw)) < len(draw) for draw in draws):
        yield "a sample is in one batch more than once"
    total = stats.binom(samples * len(draws), rate)
    if 2 * min(total.cdf(sum(sizes)), total.sf(sum(sizes) - 1)) < UNLIKELY:
        yield f"they hold {mean:.4g} samples on average, where a rate of {rate:.4g} gives {samples * rate:.4g}"
    if rate == 1 or not mean:
        return
    spread = math.sqrt(samples * rate * (1 - rate))
    # Σ(size − mean)² over the variance is about chi-square.
    dispersion = sum((size - mean) ** 2 for size in sizes) / spread**2
    chi_square = stats.chi2(len(sizes) - 1)
    if min(chi_square.cdf(dispersion), chi_square.sf(dispersion)) < UNLIKELY:
        found = math.sqrt(sum((size - mean) ** 2 for size in sizes) / (len(sizes) - 1))
        yield f"the sizes of its batches vary by ±{found:.2g} around {mean:.4g}, where draws vary by ±{spread:.2g}"
    if knows_samples:
        shared = sum(len(set(one) & set(other)) for one, other in pairwise(draws))
        expected = (len(draws) - 1) * samples * rate**2
        if stats.poisson.cdf(shared, expected) < UNLIKELY:
            yield f"{shared} times a sample is in two batches in a row, where that comes about {expected:.3g} times"


DELTA = 1e-5
EPSILON_TOLERANCE = 1e-6  # relative: epsilons of the same accountant on the same history
TIGHTEST = 0.99  # of the tightest known epsilon: less cannot be true


@dataclass
class AccountingTest:
    factory: LoopFactory
    samples: Samples
    clip_norm: float
    noise_multiplier: float
    sizes: tuple[int, ...] = (3, 0, 1, 0, 2, 1)  # as Poisson sampling may give them
    progress: Callable[[str], None] = lambda _: None
    untried: list[str] = field(default_factory=list)

    def run(self) -> Finding:
        self.progress("the accountant")
        try:
            run, taken = self._take(self.sizes)
        except StepFailed as error:
            return not_tried("steps", str(error))
        if run.loop.accountant is None:
            return not_tried("steps", "it keeps no accountant that can be asked")
        try:
            told: Counter[tuple[float, float]] = Counter()
            for noise_multiplier, sample_rate, count in run.loop.accountant.history:
                told[float(noise_multiplier), float(sample_rate)] += int(count)
            history = [(*key, count) for key, count in told.items()]
        except (AttributeError, TypeError, ValueError):
            return not_tried("steps", "the accountant has no history of (noise multiplier, sample rate, steps)")
        counted, steps = sum(n for *_, n in history), len(taken)
        faults = []
        if counted != steps:
            why = ""
            if 0 in taken and counted == steps - taken.count(0):
                why = (
                    ": empty batches are not counted, though each is a draw from the data and moves the parameters by "
                    "noise"
                )
            faults.append(f"the accountant has counted {counted} steps where {steps} were taken{why}")
        faults += [*self._entries(history, run), *self._sampling(run)]
        if not faults:
            faults = list(self._epsilon(run, history, steps))
        figures = {"steps_taken": float(steps), "steps_counted": float(counted)}
        return conclude(faults, steps, "steps", untried=self.untried, figures=figures)

    def _take(self, sizes: tuple[int, ...]) -> tuple[RunningLoop, tuple[int, ...]]:
        """Return the run and the sizes of its batches. A loop that refuses empty batches is tried without them."""
        run = self.factory.loop(max_grad_norm=self.clip_norm, noise_multiplier=self.noise_multiplier)
        for size in sizes if run.loop.accountant is not None else ():
            try:
                run.step(self.samples.ordinary_batch(size))
            except StepFailed as error:
                if size:
                    raise
                self.untried.append(f"an empty batch: {error}")
                return self._take(tuple(size for size in sizes if size))
        return run, sizes

    def _entries(self, history: list[tuple[float, float, int]], run: RunningLoop) -> Iterator[str]:
        wanted = run.loop.sample_rate
        for noise_multiplier, sample_rate, steps in history:
            if abs(noise_multiplier - self.noise_multiplier) > EPSILON_TOLERANCE * self.noise_multiplier:
                yield (
                    f"the accountant was told a noise multiplier of {noise_multiplier:g} for {steps} steps, where "
                    f"{self.noise_multiplier:g} was asked for"
                )
            if wanted is not None and abs(sample_rate - wanted) > EPSILON_TOLERANCE * wanted:
                yield (
                    f"the accountant was told a sample rate of {sample_rate:g} for {steps} steps, where batches are "
                    f"drawn at {wanted:g}"
                )
        if wanted is None:
            self.untried.append("the sample rate: the loop does not say at which rate its batches are drawn")

    def _sampling(self, run: RunningLoop) -> Iterator[str]:
        """Test that the loader draws as the accountant assumes."""
        loop = run.loop
        if getattr(loop.accountant, "dpscope_poisson", None) is False and loop.loader is None:
            yield f"poisson_sampling=False was given to make_private, and the accountant assumes it; {USE_POISSON}"
        elif loop.loader is not None:
            try:
                yield from find_sampling_faults(loop.loader, loop.sample_rate)
            except Exception as error:  # of a loader of somebody's own
                self.untried.append(f"how batches are drawn: {type(error).__name__}: {error}")
        elif getattr(loop.model, "grad_accumulation_allowed", False):  # Opacus forbids it under Poisson sampling
            self.untried.append(
                "how batches are drawn: Opacus was not asked for Poisson sampling (poisson_sampling=False?), which the "
                "accountant assumes; Loop(loader=…) has the loader tried"
            )

    def _epsilon(self, run: RunningLoop, history: list[tuple[float, float, int]], steps: int) -> Iterator[str]:
        accountant = run.loop.accountant
        if not hasattr(accountant, "get_epsilon"):
            self.untried.append("epsilon: the accountant has no get_epsilon(delta)")
            return
        from opacus.accountants import create_accountant

        mechanism = accountant.mechanism() if hasattr(accountant, "mechanism") else None
        known = mechanism if mechanism in ("rdp", "prv", "gdp") else None
        reference = create_accountant(known or "prv")
        reference.history = [(self.noise_multiplier, run.loop.sample_rate or history[0][1], steps)]
        said, right = float(accountant.get_epsilon(delta=DELTA)), float(reference.get_epsilon(delta=DELTA))
        if abs(said - right) > EPSILON_TOLERANCE * right if known else said < TIGHTEST * right:
            yield (
                f"after {steps} steps the accountant says ε = {said:.4g} at δ = {DELTA:g}; Opacus's {known or 'prv'} "
                f"accountant says {right:.4g}"
            )
