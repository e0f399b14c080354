"""Two sweeps as data: a record for each row of either, for pandas and against.csv."""

from __future__ import annotations

from typing import Any

from dpscope.reports.against.data import Against, Pair
from dpscope.reports.against.quantities import MEMORY, TIME, SweepChange
from dpscope.reports.export import IDENTITY, frame_to_csv
from dpscope.reports.output import text_output
from dpscope.reports.tables import Row
from dpscope.vocabulary.settings import COMPARED

DOUBTFUL = (TIME, TIME.ratio)  # times have a spread, and can be doubtful


def to_records(against: Against) -> list[dict[str, Any]]:
    """`in`: both, before or now. A row that only one sweep has keeps its status; the rest of it is in that sweep."""
    return [
        *(_record(pair.now, "both", *pair.statuses) | _figures(pair) for pair in against.pairs),
        *(_record(row, "before", row.result.status, None) for row in against.only_before),
        *(_record(row, "now", None, row.result.status) for row in against.only_now),
    ]


def _record(row: Row, sweeps: str, before: str | None, now: str | None) -> dict[str, Any]:
    return {**row.fields(*IDENTITY, *COMPARED), "in": sweeps, "status_before": before, "status_now": now}


def _figures(pair: Pair) -> dict[str, Any]:
    return {name: value for change in pair.changes.values() for name, value in _figure(change).items()}


def _figure(change: SweepChange) -> dict[str, Any]:
    key, before, now = change.quantity.key, change.before, change.now
    unit = f"_{change.quantity.unit}" if change.quantity.unit else ""
    named: dict[str, Any] = {
        f"{key}_before{unit}": before.value,
        f"{key}_now{unit}": now.value,
        f"{key}_change": change.relative,
        f"{key}_verdict": change.verdict or None,
    }
    if change.quantity in DOUBTFUL:
        named |= {f"{key}_doubt_before": before.doubt or None, f"{key}_doubt_now": now.doubt or None}
    if change.quantity is MEMORY:
        named |= {"memory_source_before": before.source or None, "memory_source_now": now.source or None}
    if change.quantity is TIME:
        for side, reading in (("before", before), ("now", now)):
            low, high = reading.spread or (None, None)
            named |= {f"time_p10_{side}_ms": low, f"time_p90_{side}_ms": high}
            named |= {f"time_steps_{side}": reading.steps or None}
    return named


def _against_csv(against: Against) -> str:
    return frame_to_csv(against.to_pandas())


AGAINST_CSV = text_output("against.csv", "a line for each row of either sweep", _against_csv, asked_for="csv")
