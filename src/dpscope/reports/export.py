"""Rows as data: one record for each method at each size, for pandas, CSV and LaTeX. Units are in the columns' names."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpscope.reports.memory.data import Composition, Timeline, composition_of, in_order, timeline_of
from dpscope.reports.output import text_output
from dpscope.reports.report import Report
from dpscope.reports.tables import Row
from dpscope.vocabulary.components import COMPONENTS
from dpscope.vocabulary.settings import LATER_DEFAULTS

if TYPE_CHECKING:
    import pandas

IDENTITY = ("batch_size", "seq_len", "dtype")  # beside model and method; the rest of the spec only where it varies
SOFTWARE = ("torch", "opacus", "dpscope")


def to_records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """All that is known of each row; None where nothing was measured."""
    varying = _varying_settings(rows)
    compositions = [composition_of(row) for row in rows]
    components = [component.key for component in COMPONENTS] if any(compositions) else []
    components = in_order([*components, *(key for each in compositions if each for key in each.components)])
    return [
        {
            **_identity(row),
            **{name: _setting(row, name) for name in varying},
            **_cost(row),
            **(_memory(composition, components) if components else {}),
            **({"notes": " ".join(row.notes) or None} if any(each.notes for each in rows) else {}),
            **_where(row),
        }
        for row, composition in zip(rows, compositions, strict=True)
    ]


def to_pandas(rows: Sequence[Row]) -> pandas.DataFrame:
    import pandas

    return pandas.DataFrame(to_records(rows)).convert_dtypes()


def frame_to_csv(frame: pandas.DataFrame) -> str:
    text = io.StringIO()
    frame.to_csv(text, index=False)
    return text.getvalue() if len(frame) else ""


def _timelines(rows: Sequence[Row]) -> pandas.DataFrame:
    import pandas

    points = [point for row in rows if (timeline := timeline_of(row)) for point in _points(row, timeline)]
    return pandas.DataFrame(points).convert_dtypes()


def _identity(row: Row) -> dict[str, Any]:
    spec = row.first.spec
    identity = {"model": spec["workload"]["name"], "method": row.method}
    return identity | {name: spec.get(name) for name in IDENTITY}


def _cost(row: Row) -> dict[str, Any]:
    low, high = row.spread_ms or (None, None)
    return {
        "status": row.result.status,
        "reason": row.result.reason,
        "time_median_ms": row.median_ms,
        "time_p10_ms": low,
        "time_p90_ms": high,
        "time_steps": row.steps,
        "time_doubt": row.time_doubt or None,
        "samples_per_second": row.samples_per_second,
        "tokens_per_second": row.tokens_per_second,
        "time_ratio": row.time_ratio,
        "time_ratio_doubt": row.ratio_doubt or None,
        "time_steady": row.steady if row.median_ms is not None else None,
        "peak_memory_bytes": None if row.peak_bytes is None else round(row.peak_bytes),
        "peak_memory_source": row.peak_source or None,
        "memory_ratio": row.memory_ratio,
    }


def _memory(composition: Composition | None, components: Sequence[str]) -> dict[str, Any]:
    known = composition or Composition({})
    counts = {key: round(known.components.get(key, 0.0)) if composition else None for key in components}
    return {
        **{f"{key}_bytes": count for key, count in counts.items()},
        "peak_phase": known.phase,
        "peak_operator": known.operator,
        "peak_module": known.module,
    }


def _where(row: Row) -> dict[str, Any]:
    environment = row.first.environment
    hardware = environment.get("gpu") or environment.get("cpu")
    return {"hardware": hardware, **{name: environment.get(name) for name in SOFTWARE}}


def _points(row: Row, timeline: Timeline) -> list[dict[str, Any]]:
    """An event a record, with the phase it fell in."""
    records = []
    for place, event in enumerate(timeline.events):
        phase = next((phase.name for phase in timeline.phases if phase.start <= event < phase.end), None)
        levels = {f"{key}_bytes": round(level[place]) for key, level in timeline.levels.items()}
        records.append({**_identity(row), "event": event, "phase": phase, **levels})
    return records


def _varying_settings(rows: Sequence[Row]) -> list[str]:
    """Settings and sizes of the model that differ between rows."""
    left_out = {*IDENTITY, "workload", "method", "instrument", "options", "name", "kind"}
    names = dict.fromkeys(name for row in rows for name in (*row.first.spec, *row.first.spec["workload"]))
    return [name for name in names if name not in left_out and len({repr(_setting(row, name)) for row in rows}) > 1]


def _setting(row: Row, name: str) -> Any:
    spec = row.first.spec
    return {**LATER_DEFAULTS, **spec["workload"], **spec}.get(name)


def _results_csv(report: Report) -> str:
    return frame_to_csv(to_pandas(report.rows))


def _timeline_csv(report: Report) -> str:
    return frame_to_csv(_timelines(report.rows))


CSV = (
    text_output("results.csv", "a line for each method and size", _results_csv, asked_for="csv"),
    text_output("timeline.csv", "live bytes by component after each event", _timeline_csv, asked_for="csv"),
)
