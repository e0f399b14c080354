"""The largest physical batch that fits a card, and rows of a sweep that do not fit the GPU at hand.

Peaks are nearly lines in the batch size, so a few steps suffice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dpscope.errors import UserError
from dpscope.forecast.allocator import OutOfFakeMemory
from dpscope.forecast.cards import CARDS, Card
from dpscope.forecast.probe import Say
from dpscope.forecast.step import StepForecast, forecast_step
from dpscope.runner.spec import RunSpec
from dpscope.units import format_bytes, list_names

LEFT_FREE = 0.02  # of a card's memory that a plan leaves free
CLOSE = 0.02  # between a batch that fits and one that does not
CLEARLY = 0.02  # beyond the limit: no step is tried there
MOST_STEPS_TRIED = 10
MOST_SAMPLES = 2**20  # in a physical batch: flash clipping compares each of them in its first step
FARTHEST = 16  # times the largest batch that fits, to the next one that is tried


@dataclass
class BatchFit:
    """Largest batch that fits, 0 if not even one sample does. `points`: steps that were tried and fit, by batch."""

    batch: int
    limit: int
    points: dict[int, StepForecast] = field(default_factory=dict)


def memory_limit(card: Card) -> int:
    """Return the bytes that torch's allocator may reserve in a plan."""
    return int(card.usable_bytes * (1 - LEFT_FREE))


def largest_batch(spec: RunSpec, card: Card, most: int, say: Say, limit: int | None = None) -> BatchFit:
    """Find the largest batch of at most `most` samples whose step fits, and that of a somewhat smaller one, too.

    Near the limit it hangs on chance which freed blocks serve the next tensor, and what is reserved goes up and down: a
    batch that fits above one that does not is not taken.
    """
    fit = BatchFit(0, memory_limit(card) if limit is None else limit)
    tried: dict[int, bool] = {}
    most = min(most, MOST_SAMPLES)

    def fits(batch: int) -> bool:
        if batch not in tried:
            say(f"{spec.method}: a step of {batch}")
            try:
                fit.points[batch] = forecast_step(
                    replace(spec, batch_size=batch), card, detailed=False, limit=fit.limit
                )
            except OutOfFakeMemory:
                tried[batch] = False
            else:
                tried[batch] = True
        return tried[batch]

    if not fits(1):
        fit.points[1] = forecast_step(replace(spec, batch_size=1), card, detailed=False)
        return fit
    fit.batch, failing = 1, most + 1
    if most > 4:
        fit.batch, failing = (4, failing) if fits(4) else (1, 4)
    for _ in range(MOST_STEPS_TRIED):
        if fit.batch >= most or failing - fit.batch <= _close(fit.batch):
            break
        guess = _guess(fit, failing, most)
        if guess <= fit.batch:
            break
        if fits(guess):
            fit.batch = guess
        else:
            failing = guess
    while failing <= most and fit.batch > 1:
        smaller = fit.batch - _close(fit.batch), fit.batch - max(1, int(2 * CLOSE * fit.batch))
        if fits(fit.batch) and any(map(fits, smaller)):
            break
        fit.batch = smaller[0]
    return fit


def _close(batch: int) -> int:
    return max(1, int(CLOSE * batch))


def _guess(fit: BatchFit, failing: int, most: int) -> int:
    """Return where the line through the two largest batches that fit reaches the limit, between the bounds.

    At small batches another phase may set the peak, so no step towards the limit is too large. If one more sample is
    clearly beyond the limit, the batch before it is the answer.
    """
    reached = float(fit.batch + failing) / 2
    sizes = sorted(size for size in fit.points if size <= fit.batch)
    if len(sizes) >= 2:
        low, high = sizes[-2:]
        least, largest = fit.points[low].peak_bytes, fit.points[high].peak_bytes
        slope = (largest - least) / (high - low)
        reached = high + (fit.limit - largest) / slope if slope > 0 else math.inf
        if largest + slope > (1 + CLEARLY) * fit.limit and failing <= most:
            return fit.batch
    if reached >= failing and failing <= most:
        # A step reserves somewhat more than it holds, so that the line's end itself often fails.
        far = failing > 2 * fit.batch
        reached = math.sqrt(fit.batch * failing) if far else fit.batch + 0.8 * (failing - fit.batch)
    reached = min(reached, FARTHEST * fit.batch, failing - 1)
    return max(fit.batch + 1, int(reached))


def limited_by(step: StepForecast) -> str:
    """Return the component that takes most of the peak."""
    return max(step.components, key=lambda name: step.components[name], default="")


def rows_that_will_not_fit(specs: Sequence[RunSpec], memory_bytes: int, capability: tuple[int, int]) -> str:
    """Return a line that names the rows whose predicted peak is above the available memory; "" if there are none."""
    card = _card_like(memory_bytes, capability)
    found: list[str] = []
    kinds: dict[object, list[RunSpec]] = {}
    for spec in dict.fromkeys(replace(each, instrument="time", options={}) for each in specs):
        kinds.setdefault(replace(spec, batch_size=1, seq_len=None), []).append(spec)
    for rows in kinds.values():
        for spec in sorted(rows, key=lambda each: -each.batch_size * (each.seq_len or 1)):
            try:
                peak = forecast_step(spec, card, detailed=False).peak_bytes
            except (UserError, RuntimeError, NotImplementedError):
                break  # the row itself will say what is wrong
            if peak <= memory_bytes:
                break
            found.append(f"{spec.label} ({format_bytes(peak)})")
    if not found:
        return ""
    count = "1 row is" if len(found) == 1 else f"{len(found)} rows are"
    names = list_names(found, most=4)
    return f"{count} predicted not to fit into {format_bytes(memory_bytes)}, and will be tried: {names}."


def _card_like(memory_bytes: int, capability: tuple[int, int]) -> Card:
    """Return the nearest card of the table, with this GPU's memory."""
    alike = min(
        CARDS.values(),
        key=lambda card: (abs(card.capability[0] - capability[0]), abs(card.memory_bytes - memory_bytes)),
    )
    return replace(alike, memory_gib=memory_bytes / 2**30, capability=capability)
