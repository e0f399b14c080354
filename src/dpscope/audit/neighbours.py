"""Test of neighbouring batches: removing a sample moves the noiseless sum by at most C, replacing one by at most 2C.

All privacy accounting rests on this. A batch is moved three ways, each on one loop, as in training:

    copies     one sample B times, C a little above its norm: the effect of a neighbour adds up B − 1 times
    clipped    ordinary samples in batches of sizes that coincide with other lengths, C far below their norms
    mixed      ordinary samples, C between their norms
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from dpscope.audit.loop import LoopFactory, ObservedStep, RunningLoop, StepFailed
from dpscope.audit.mixing import CHANGED, locate_mixing
from dpscope.audit.samples import COMPANIONS, UNCLIPPED, ZEROS, Samples
from dpscope.audit.verdict import Finding, conclude, not_tried

REPLACED, REMOVED = "replacing", "removing"
BOUNDS = {REPLACED: 2.0, REMOVED: 1.0}  # of C
ROUNDING_SLACK = 1e-3  # relative: what rounding may add
COPIES_IN_BATCH = 6
MIN_NORM_SHARE = 1e-2  # of the usual norm: a gradient below it may be nothing but rounding
OTHER_PARAMETERS = (4.0, 0.25)  # times those of the start
SEEDS_TRIED = 16  # to see whether a step depends on what it draws
MAX_ROUNDING_OF_CLIP_NORM = 0.05  # of C: beyond it, nothing can be read off the parameters


@dataclass(frozen=True)
class Trial:
    """A batch, its neighbour, and by how much the sum moved."""

    batch: tuple[int, ...]
    position: int  # of the sample that was replaced or removed
    other: int | None  # which sample took its place
    clip_norm: float
    moved: float = 0.0  # in C
    limit: float = 1.0  # in C
    buffers: tuple[str, ...] = ()  # that differ afterwards
    factor: float = 1.0  # of the parameters: times those of the start
    silent: bool = False  # with the model's randomness off

    @property
    def change(self) -> str:
        return REMOVED if self.other is None else REPLACED

    @property
    def share(self) -> float:
        return self.moved / self.limit

    @property
    def neighbour(self) -> list[int]:
        kept = list(self.batch)
        kept[self.position : self.position + 1] = [] if self.other is None else [self.other]
        return kept


@dataclass
class NeighbourTest:
    """Runner of the trials, with their results."""

    factory: LoopFactory
    samples: Samples
    norms: dict[int, float]  # of samples by themselves
    sizes: Sequence[int]
    clip_norm: float | None = None  # one more to try
    progress: Callable[[str], None] = lambda _: None
    trials: list[Trial] = field(default_factory=list)
    untried: dict[str, list[str]] = field(default_factory=dict)  # why -> what
    drifts: list[str] = field(default_factory=list)
    silent: bool = False  # with the model's randomness off, just now
    removes: bool = True  # whether others than the only sample are removed

    def run(self) -> Finding:
        usable = [index for index in self.samples.ordinary if self.norms.get(index)]
        if not usable:
            return not_tried("trials", "no sample has a finite gradient that is not zero, so that nothing moves")
        for silent, removes in self._ways():
            self.silent, self.removes = silent, removes
            self._copies(usable)
            self._sizes(usable)
        worst = max(self.trials, key=lambda trial: trial.share, default=None)
        figures = {} if worst is None else {"largest_move_of_allowed": worst.share}
        untried = [f"{', '.join(what)}: {why}" for why, what in self.untried.items()]
        return conclude(self._faults(), len(self.trials), "trials", untried=untried, figures=figures)

    def _ways(self) -> list[tuple[bool, bool]]:
        """Return how the model runs: (its randomness off, samples removed)."""
        if not self.factory.random:
            return [(False, True)]
        if not is_random(self._loop(UNCLIPPED, silent=True), self.samples):
            return [(True, True), (False, False)]
        self._note_untried(
            "removing one of several samples",
            "what the model draws at random for the others changes with the batch's size and cannot be switched off",
        )
        return [(False, False)]

    def _loop(self, clip_norm: float, silent: bool | None = None) -> RunningLoop:
        return self.factory.loop(max_grad_norm=clip_norm, silent=self.silent if silent is None else silent)

    # -- batches -------------------------------------------------------------------------------------------------------

    def _copies(self, usable: list[int]) -> None:
        """Try batches of one sample repeated, with C just above its norm in such a batch."""
        extremes = [i for name, i in self.samples.extremes.items() if name != ZEROS and self.norms.get(i)]
        by_norm = sorted(usable, key=lambda index: self.norms[index])
        bases = list(dict.fromkeys([by_norm[0], by_norm[-1], *extremes]))
        others = [usable[-1], *(index for index in self.samples.extremes.values() if index in self.norms)]
        usual = statistics.median(self.norms[index] for index in usable)
        unclipped = self._loop(UNCLIPPED)
        for base in bases:
            self.progress(f"neighbours of {COPIES_IN_BATCH} copies")
            batch = [base] * COPIES_IN_BATCH
            try:
                norm = unclipped.step(self.samples.batch(batch)).norm / COPIES_IN_BATCH
            except StepFailed as error:
                self._note_untried(f"batches of {COPIES_IN_BATCH}", str(error))
                return
            if math.isfinite(norm):
                clip_norm = 1.05 * max(norm, MIN_NORM_SHARE * usual)
                position = len(self.trials) % COPIES_IN_BATCH
                self._try_neighbours(self._loop(clip_norm), clip_norm, batch, position, others)

    def _sizes(self, usable: list[int]) -> None:
        known = [self.norms[index] for index in usable]
        low, middle = min(known) / 100, statistics.median(known)
        own = [] if self.clip_norm is None else [(self.clip_norm, (4,))]
        for clip_norm, sizes in [(low, (4, *self.sizes, 1)), (middle, (3, 1, 4)), *own]:
            self._sequence(clip_norm, list(dict.fromkeys(sizes)), usable)

    def _sequence(self, clip_norm: float, sizes: list[int], usable: list[int]) -> None:
        """Try batches of these sizes on one loop, as Poisson sampling would give them, then the first batch again."""
        loop = self._loop(clip_norm)
        extremes = [index for index in self.samples.extremes.values() if index in self.norms]
        first: tuple[list[int], ObservedStep] | None = None
        for turn, size in enumerate(sizes):
            self.progress(f"neighbours in batches of {size}")
            batch = [usable[(turn + k) % len(usable)] for k in range(size)]
            # In turn: a sample that is in the batch already, one that is not, and the extreme ones.
            others = [batch[0], usable[(turn + size) % len(usable)], *extremes]
            base = self._try_neighbours(loop, clip_norm, batch, [0, size - 1][turn % 2], [others[turn % len(others)]])
            if base is not None and first is None:
                first = (batch, base)
        if first is None:
            return
        if first[0]:
            self._at_other_parameters(loop, clip_norm, first[0][0])
        try:
            again = loop.step(self.samples.batch(first[0]))
        except StepFailed:
            return
        drift = again.distance(first[1]) / clip_norm
        if drift > ROUNDING_SLACK * len(first[0]) + self._rounding(loop, clip_norm):
            self.drifts.append(
                f"the same batch without noise gives another sum after other batches (by {drift:.3g} C): "
                "something of one step is carried into the next, so that a sample counts in steps it is not in"
            )

    # -- trials --------------------------------------------------------------------------------------------------------

    def _try_neighbours(
        self, loop: RunningLoop, clip_norm: float, batch: list[int], position: int, others: Sequence[int]
    ) -> ObservedStep | None:
        """Return the batch, then its neighbours: one sample replaced by others, and one sample removed."""
        rounding = self._rounding(loop, clip_norm)
        if rounding > MAX_ROUNDING_OF_CLIP_NORM:
            self._note_untried(
                f"clipping at {clip_norm:.3g}",
                "updates are lost in the rounding of the parameters: take a larger learning rate, and so a larger "
                "scale",
            )
            return None
        base = self._try(loop, batch)
        if base is None:
            return None
        removes = self.removes or len(batch) == 1
        without = self._try(loop, [*batch[:position], *batch[position + 1 :]]) if removes else None
        if without is not None:
            self._record(Trial(tuple(batch), position, None, clip_norm), base, without, rounding)
        for other in others:
            trial = Trial(tuple(batch), position, other, clip_norm)
            neighbour = self._try(loop, trial.neighbour) if other != batch[position] else None
            if neighbour is not None:
                self._record(trial, base, neighbour, rounding)
                if without is not None:  # without that sample it is the same batch
                    self._record(Trial(tuple(trial.neighbour), position, None, clip_norm), neighbour, without, rounding)
        return base

    def _at_other_parameters(self, loop: RunningLoop, clip_norm: float, sample: int) -> None:
        """Try a single sample at other parameters, where norms cached from the first steps would be wrong."""
        for factor in OTHER_PARAMETERS:
            try:
                alone, nobody = (loop.step(self.samples.batch(batch), factor) for batch in ([sample], []))
            except StepFailed:
                return
            if math.isfinite(alone.norm) and math.isfinite(nobody.norm):
                trial = Trial((sample,), 0, None, clip_norm, factor=factor)
                self._record(trial, alone, nobody, max(1.0, factor) * self._rounding(loop, clip_norm))

    def _record(self, trial: Trial, base: ObservedStep, neighbour: ObservedStep, rounding: float) -> None:
        limit = BOUNDS[trial.change] * (1 + ROUNDING_SLACK) + rounding
        moved = neighbour.distance(base) / trial.clip_norm
        pairs = {name: (b, neighbour.buffers[name]) for name, b in base.buffers.items() if name in neighbour.buffers}
        buffers = sorted(
            name
            for name, (b, other) in pairs.items()
            if b.shape == other.shape and not b.allclose(other, rtol=1e-5, equal_nan=True)
        )
        self.trials.append(replace(trial, moved=moved, limit=limit, buffers=tuple(buffers), silent=self.silent))

    def _rounding(self, loop: RunningLoop, clip_norm: float) -> float:
        return self.factory.rounding(loop.loop.scale) / clip_norm

    def _try(self, loop: RunningLoop, batch: list[int]) -> ObservedStep | None:
        try:
            return loop.step(self.samples.batch(batch))
        except StepFailed as error:
            self._note_untried(f"batches of {len(batch)}" if batch else "an empty batch", str(error))
            return None

    def _note_untried(self, what: str, why: str) -> None:
        reasons = self.untried.setdefault(why, [])
        if what not in reasons:
            reasons.append(what)

    # -- what was found ------------------------------------------------------------------------------------------------

    def _faults(self) -> list[str]:
        faults = self.drifts[:1]
        if beyond := [trial for trial in self.trials if not trial.moved <= trial.limit]:
            faults.append(self._sentence(max(beyond, key=lambda trial: trial.share), len(beyond)))
            faults += self._locate(beyond)
        if leaking := next((trial for trial in self.trials if trial.buffers), None):
            faults.append(
                f"{', '.join(leaking.buffers[:3])}, no parameter, changes with a single sample, and no noise is added"
            )
        return faults

    def _sentence(self, worst: Trial, count: int) -> str:
        size, bound = len(worst.batch), BOUNDS[worst.change]
        kind = f"one of {size} samples" if size > 1 else "the only sample"
        if size > 1 and len(set(worst.batch)) == 1:
            kind = f"one of {size} copies of a sample"
        extreme = next((name for name, i in self.samples.extremes.items() if i == worst.other), "another")
        by = "" if worst.other is None else f" by {extreme}"
        moved = "is no longer finite" if math.isinf(worst.moved) else f"moves by {worst.moved:.3g} C"
        return (
            f"{worst.change} {kind}{by}, the noiseless sum {moved}, where clipping at C allows {bound:g} C (C = "
            f"{worst.clip_norm:.3g}; {count} of {len(self.trials)} trials are beyond their bound)"
        )

    def _locate(self, beyond: list[Trial]) -> Iterator[str]:
        """Find where the rows of other samples moved, by replacing a sample so that rows stay in place."""
        if replaced := [trial for trial in beyond if trial.other is not None and len(trial.batch) > 1]:
            trial = max(replaced, key=lambda trial: trial.share)
            loop = self._loop(trial.clip_norm, trial.silent)
            batches = self.samples.batch(trial.batch), self.samples.batch(trial.neighbour)
            place = locate_mixing(loop, *batches, trial.position, len(trial.batch))
            yield place.sentence
            if place.found:
                return
        if usual := [trial for trial in beyond if trial.factor == 1]:
            yield from self._explain_shares(max(usual, key=lambda trial: trial.share))
        else:
            yield (
                f"it is so at parameters {beyond[0].factor:g} times those of the first steps alone: are norms kept "
                "from earlier parameters?"
            )

    def _explain_shares(self, trial: Trial) -> Iterator[str]:
        """Explain why a sample's share is wrong in sums that hold only copies of it."""
        loop = self._loop(trial.clip_norm, trial.silent)
        size = len(trial.batch)
        for sample in dict.fromkeys([trial.batch[trial.position], *trial.batch]):
            try:
                sums = {n: loop.step(self.samples.batch([sample] * n)).norm for n in sorted({1, 2, size, 2 * size})}
            except StepFailed:
                return
            shares = {n: total / n / trial.clip_norm for n, total in sums.items()}  # in C
            low, high = min(shares.values()), max(shares.values())
            if high > (1 + 10 * ROUNDING_SLACK) * low:
                shown = ", ".join(f"{share:.3g} C in a batch of {n}" for n, share in shares.items())
                yield f"a sample's share depends on the batch's own size: {shown}"
                return
            if high > 1 + 10 * ROUNDING_SLACK:
                norm = self.norms.get(sample, 0.0)
                if abs(high * trial.clip_norm - norm) <= 0.01 * norm:
                    yield f"a sample's gradient of norm {norm:.3g} goes into the sum as it is: it is not clipped"
                    return
                is_whole = abs(high - round(high)) < 0.01
                times = f"it counts {round(high)} times" if is_whole else "its norm is taken too small"
                yield (
                    f"a sample's share is {high:.3g} C in every batch: {times}, or Loop(scale=…) is not that of the "
                    "loop"
                )
                return


def is_random(loop: RunningLoop, samples: Samples) -> bool:
    """Return whether a step without noise depends on random numbers that it draws."""
    batch = samples.batch(samples.ordinary[:COMPANIONS])
    first, again = loop.step(batch), loop.step(batch)
    if again.distance(first) > CHANGED * first.norm:
        return False
    others = (loop.step(batch, state=seed) for seed in range(1, SEEDS_TRIED))
    return any(other.distance(first) > CHANGED * first.norm for other in others)
