"""Two sweeps as data: a record for each row of either, for pandas and against.csv."""

from __future__ import annotations

from typing import Any

from dpscope.reports.against.changes import FIGURES, MEMORY, RATIOS, TIME, Change
from dpscope.reports.against.data import Against, Pair
from dpscope.reports.export import IDENTITY, frame_to_csv
from dpscope.reports.output import text_output
from dpscope.reports.tables import Row
from dpscope.vocabulary.settings import COMPARED, SETTINGS

TIMES = (TIME.key, RATIOS[TIME.key].key)  # figures that have a spread, and can be doubtful


def to_records(against: Against) -> list[dict[str, Any]]:
    """`in`: both, before or now. A row that only one sweep has keeps its status; the rest of it is in that sweep."""
    alone = (("before", against.only_before), ("now", against.only_now))
    return [
        *(
            {**_identity(pair.now), "in": "both", **_statuses(*pair.statuses), **_figures(pair)}
            for pair in against.pairs
        ),
        *(
            {**_identity(row), "in": side, **_statuses(**{side: row.result.status})}
            for side, rows in alone
            for row in rows
        ),
    ]


def _identity(row: Row) -> dict[str, Any]:
    spec = row.first.spec
    told = {name: spec.get(name) for name in IDENTITY} | {name: SETTINGS[name].of(spec) for name in COMPARED}
    return {"model": spec["workload"]["name"], "method": row.method, **told}


def _statuses(before: str | None = None, now: str | None = None) -> dict[str, Any]:
    return {"status_before": before, "status_now": now}


def _figures(pair: Pair) -> dict[str, Any]:
    return {
        name: value
        for figure in FIGURES
        for key in (figure.key, RATIOS[figure.key].key)
        for name, value in _figure(key, pair.changes[key]).items()
    }


def _figure(key: str, change: Change) -> dict[str, Any]:
    unit = f"_{change.figure.unit}" if change.figure.unit else ""
    named: dict[str, Any] = {
        f"{key}_before{unit}": change.before.value,
        f"{key}_now{unit}": change.now.value,
        f"{key}_change": change.relative,
        f"{key}_verdict": change.verdict or None,
    }
    if key in TIMES:
        named |= {f"{key}_doubt_before": change.before.doubt or None, f"{key}_doubt_now": change.now.doubt or None}
    if key == MEMORY.key:
        named |= {"memory_source_before": change.before.source or None, "memory_source_now": change.now.source or None}
    if key == TIME.key:
        for side, reading in (("before", change.before), ("now", change.now)):
            low, high = reading.spread or (None, None)
            named |= {
                f"time_p10_{side}_ms": low,
                f"time_p90_{side}_ms": high,
                f"time_steps_{side}": reading.steps or None,
            }
    return named


def _against_csv(against: Against) -> str:
    return frame_to_csv(against.to_pandas())


AGAINST_CSV = text_output("against.csv", "a line for each row of either sweep", _against_csv, asked_for="csv")
