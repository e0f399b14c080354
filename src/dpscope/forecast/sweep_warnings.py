"""Rows of a sweep that will not fit, said before the sweep starts. They are tried all the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dpscope.errors import UserError
from dpscope.forecast.cards import CARDS, Card
from dpscope.forecast.step import forecast_step
from dpscope.runner.spec import RunSpec
from dpscope.units import format_bytes


def rows_that_will_not_fit(specs: Sequence[RunSpec], memory_bytes: int, capability: tuple[int, int]) -> list[str]:
    """Return a line for each row that is predicted to need more memory than there is; largest batches first."""
    card = _card_like(memory_bytes, capability)
    found: list[str] = []
    kinds: dict[object, list[RunSpec]] = {}
    for spec in dict.fromkeys(replace(each, instrument="time", options={}) for each in specs if each.world_size == 1):
        kinds.setdefault(replace(spec, batch_size=1, seq_len=None), []).append(spec)
    for rows in kinds.values():
        for spec in sorted(rows, key=lambda each: -each.batch_size * (each.seq_len or 1)):
            try:
                peak = forecast_step(spec, card, detailed=False).peak_bytes
            except (UserError, RuntimeError, NotImplementedError):
                break  # the row itself will say what is wrong
            if peak <= memory_bytes:
                break
            found.append(
                f"{spec.label} is predicted to peak at {format_bytes(peak)}; the GPU has {format_bytes(memory_bytes)}"
            )
    return found


def _card_like(memory_bytes: int, capability: tuple[int, int]) -> Card:
    """Return the nearest card of the table, with this GPU's memory."""
    alike = min(
        CARDS.values(),
        key=lambda card: (abs(card.capability[0] - capability[0]), abs(card.memory_bytes - memory_bytes)),
    )
    return replace(alike, memory_gib=memory_bytes / 2**30, capability=capability)
