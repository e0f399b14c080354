"""The largest physical batch that fits a card, and rows of a sweep that do not fit the GPU at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dpscope.errors import UserError
from dpscope.forecast.allocator import OutOfFakeMemory
from dpscope.forecast.cards import CARDS, Card
from dpscope.forecast.probe import Say
from dpscope.forecast.search import CLOSE, close_to, search_batch
from dpscope.forecast.step import StepForecast, forecast_step
from dpscope.runner.spec import RunSpec
from dpscope.units import format_bytes, list_names

LEFT_FREE = 0.02  # of a card's memory that a plan leaves free
MOST_SAMPLES = 2**20  # in a physical batch: flash clipping compares each of them in its first step


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
    tried: dict[int, int | None] = {}

    def peak_of(batch: int) -> int | None:
        if batch not in tried:
            say(f"{spec.method}: a step of {batch}")
            try:
                step = forecast_step(replace(spec, batch_size=batch), card, detailed=False, limit=fit.limit)
            except OutOfFakeMemory:
                tried[batch] = None
            else:
                fit.points[batch], tried[batch] = step, step.peak_bytes
        return tried[batch]

    most = min(most, MOST_SAMPLES)
    fit.batch, failing = search_batch(peak_of, fit.limit, most)
    if not fit.batch:
        fit.points[1] = forecast_step(replace(spec, batch_size=1), card, detailed=False)
    while failing <= most and fit.batch > 1:
        smaller = fit.batch - close_to(fit.batch), fit.batch - max(1, int(2 * CLOSE * fit.batch))
        if peak_of(fit.batch) is not None and any(peak_of(each) is not None for each in smaller):
            break
        fit.batch = smaller[0]
    return fit


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
