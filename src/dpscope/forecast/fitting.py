"""The largest physical batch that fits a card: peaks are nearly lines in the batch size, so few steps are looked at."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dpscope.forecast.cards import Card
from dpscope.forecast.probe import Probe
from dpscope.forecast.segments import OutOfFakeMemory
from dpscope.forecast.step import StepForecast, forecast_step
from dpscope.runner.spec import RunSpec

LEFT_FREE = 0.02  # of a card's memory that a plan leaves free
CLOSE = 0.02  # between a batch that fits and one that does not
MOST_STEPS_TRIED = 10
FARTHEST = 16  # times the largest batch that fits, to the next one that is tried

Say = Callable[[str], None]


@dataclass
class BatchFit:
    """`batch`: the largest that fits, 0 where not even one sample does; `points`: peaks in bytes by batch."""

    batch: int
    limit: int
    points: dict[int, int] = field(default_factory=dict)
    probes: list[Probe] = field(default_factory=list)


def memory_limit(card: Card) -> int:
    """Return what a plan lets torch's allocator reserve."""
    return int(card.usable_bytes * (1 - LEFT_FREE))


def largest_batch(spec: RunSpec, card: Card, most: int, say: Say, limit: int | None = None) -> BatchFit:
    """Find the largest batch of at most `most` samples whose step fits."""
    allowed = memory_limit(card) if limit is None else limit
    fit = BatchFit(0, allowed)
    failing = most + 1

    def try_out(batch: int) -> bool:
        say(f"{spec.method}: a step of {batch}")
        try:
            step = _try(spec, card, batch, allowed)
        except OutOfFakeMemory:
            return False
        fit.points[batch] = step.peak_bytes
        return True

    say(f"{spec.method}: a step of 1")
    first = forecast_step(replace(spec, batch_size=1), card, detailed=False)
    fit.points[1] = first.peak_bytes
    if first.peak_bytes > allowed or (first.reserved_bytes > allowed and not try_out(1)):
        return fit
    fit.batch = 1
    if most > 4 and try_out(4):
        fit.batch = 4
    for _ in range(MOST_STEPS_TRIED):
        if fit.batch >= most or failing - fit.batch <= max(1, int(CLOSE * fit.batch)):
            break
        guess = _guess(fit, failing, most)
        if try_out(guess):
            fit.batch = guess
        else:
            failing = guess
    return fit


def _try(spec: RunSpec, card: Card, batch: int, limit: int) -> StepForecast:
    return forecast_step(replace(spec, batch_size=batch), card, detailed=False, limit=limit)


def _guess(fit: BatchFit, failing: int, most: int) -> int:
    """Return where the line through the two largest batches that fit reaches the limit, between the bounds.

    The line of small batches may be that of another phase than the one that counts later: no step is too large.
    """
    reached = float(fit.batch + failing) / 2
    sizes = sorted(size for size in fit.points if size <= fit.batch)
    if len(sizes) >= 2:
        low, high = sizes[-2:]
        slope = (fit.points[high] - fit.points[low]) / (high - low)
        reached = high + (fit.limit - fit.points[high]) / slope if slope > 0 else math.inf
    if reached >= failing and failing <= most:
        # A step reserves somewhat more than it holds, so that the line's end itself often fails.
        far = failing > 2 * fit.batch
        reached = math.sqrt(fit.batch * failing) if far else fit.batch + 0.8 * (failing - fit.batch)
    reached = min(reached, FARTHEST * fit.batch, failing - 1)
    return max(fit.batch + 1, int(reached))


def limited_by(step: StepForecast) -> str:
    """Return the component that takes most of the peak."""
    return max(step.components, key=lambda name: step.components[name], default="")
