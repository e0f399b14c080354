"""What reports say of rows whose model torch.compile ran: their ratios are to compiled ordinary training."""

from __future__ import annotations

from collections.abc import Sequence

from dpscope.reports.tables import Row
from dpscope.units import format_duration, format_ratio
from dpscope.vocabulary.settings import EAGER


def compilation_notes(rows: Sequence[Row]) -> list[str]:
    """What the ratios of compiled rows are, and how long torch.compile took."""
    notes = []
    if any(row.eager_time_ratio for row in rows):
        notes.append("× of a compiled row is the ratio to compiled standard, × eager that to eager standard.")
    took = [f"{row.method} {format_duration(row.compilation['seconds'])}" for row in rows if row.compilation]
    if took:
        notes.append(f"Compilation, before warm-up and in no other figure: {', '.join(took)}.")
    return notes


def ordinary_training(row: Row) -> str:
    """What the ratios of a row are to, and how its time compares with eager ordinary training."""
    if row.field("compile") == EAGER:
        return "ordinary training"
    ratio = None if row.eager_ratio_doubt else row.eager_time_ratio
    eager = "" if ratio is None else f", and {format_ratio(ratio)} the time of eager ordinary training"
    return f"compiled ordinary training{eager}"
