"""The table of all rows: displayed text, sort keys, and unrounded values for CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from dpscope.reports.export import to_records
from dpscope.reports.palette import looks_of
from dpscope.reports.ranks import ranks_of, scaling_shown
from dpscope.reports.report import Report
from dpscope.reports.tables import SPEEDS, Row, heading_of, worth_a_column
from dpscope.reports.traffic.data import traffic_of
from dpscope.reports.words import spread_in_words
from dpscope.units import MISSING, format_bytes, format_duration, format_ratio, format_traffic
from dpscope.vocabulary.settings import COMPARED, EAGERLY, REPEATS

NO_STANDARD, NOT_TIMED = "standard has no such figure at this size", "not timed"
COMPILED_ONLY = "of compiled rows and CUDA graphs, where eager standard was measured too"
FILTERS = {"method": attrgetter("method"), "size": attrgetter("size"), "status": attrgetter("result.status")}


@dataclass(frozen=True)
class TableCell:
    text: str
    value: str | float  # what its column sorts by; "" where there is nothing
    why: str = ""  # why it is missing
    share: float | None = None  # of the column's largest ratio: the length of its bar
    number: bool = True


@dataclass(frozen=True)
class RowsTable:
    columns: list[tuple[str, bool]]  # heading, and whether it holds numbers
    lines: list[tuple[Row, str, list[TableCell]]]  # with the colour of its method
    choices: dict[str, list[str]]  # what a reader can filter by
    csv: dict[str, Any]


@dataclass(frozen=True)
class RowFigure:
    """A figure of a row, how it is shown, and why a row that did not fail may have none."""

    value: Callable[[Row], float | None]
    show: Callable[[Row], str]
    why: str

    def cells(self, rows: Sequence[Row], *, bars: bool = False) -> list[TableCell]:
        largest = max((self.value(row) or 0.0 for row in rows), default=0.0) if bars else 0.0
        cells = []
        for row in rows:
            value, failed = self.value(row), f"{row.result.status}: {row.result.reason}"
            if value is None:
                cells.append(TableCell(MISSING, "", self.why if row.result.ok else failed))
            else:
                cells.append(TableCell(self.show(row), value, share=value / largest if largest else None))
        return cells


def _derived(find: Callable[[Row], Any], name: str, show: Callable[[Any], str], why: str) -> RowFigure:
    """Return a figure of something that only some rows have."""
    return RowFigure(lambda row: getattr(find(row), name, None), lambda row: show(find(row)), why)


def _speed(name: str) -> RowFigure:
    return RowFigure(lambda row: row.speeds.get(name), partial(Row.speed_shown, name=name), NOT_TIMED)


# What is compared comes first: on a phone the rest is a scroll away.
RATIOS = {
    "time ×": RowFigure(attrgetter("time_ratio"), attrgetter("time_ratio_shown"), NO_STANDARD),
    "memory ×": RowFigure(attrgetter("memory_ratio"), lambda row: format_ratio(row.memory_ratio), NO_STANDARD),
    "time × eager": RowFigure(attrgetter("eager_time_ratio"), attrgetter("eager_time_ratio_shown"), COMPILED_ONLY),
    "memory × eager": RowFigure(
        attrgetter("eager_memory_ratio"), lambda row: format_ratio(row.eager_memory_ratio), COMPILED_ONLY
    ),
    "bytes ×": _derived(traffic_of, "ratio", lambda moved: moved.show(format_ratio(moved.ratio)), NO_STANDARD),
}
ABSOLUTES = {
    "time a step": RowFigure(attrgetter("median_ms"), attrgetter("time_shown"), NOT_TIMED),
    "p10–p90, ms": RowFigure(
        lambda row: row.spread_ms and row.spread_ms[0], lambda row: spread_in_words(row.spread_ms), NOT_TIMED
    ),
    **{name: _speed(name) for name in SPEEDS},
    "peak memory": RowFigure(attrgetter("peak_bytes"), lambda row: format_bytes(row.peak_bytes), "not measured"),
    "compiling": RowFigure(
        lambda row: row.compilation and row.compilation["seconds"],
        lambda row: format_duration(row.compilation["seconds"] if row.compilation else 0),
        "not compiled",
    ),
    "scaling": RowFigure(attrgetter("scaling"), scaling_shown, "no row of one process with that batch"),
    "collectives": _derived(
        ranks_of, "collective_bytes", lambda ranks: format_bytes(ranks.collective_bytes), "one process"
    ),
    "in collectives": _derived(ranks_of, "share", lambda ranks: f"{ranks.share:.0%}", "not measured"),
    "DRAM bytes": _derived(
        traffic_of, "dram_bytes", lambda moved: moved.show(format_traffic(moved.dram_bytes)), "not counted: dpscope ncu"
    ),
}
# Columns that are there only where a row has such a figure.
OPTIONAL = (*SPEEDS, "time × eager", "memory × eager", "compiling", "scaling", "collectives", "in collectives")


def make_table(report: Report) -> RowsTable:
    rows = [row for size in report.sizes for row in size.rows]
    moved = any(map(traffic_of, rows))
    absent = {name for name in OPTIONAL if all((RATIOS | ABSOLUTES)[name].value(row) is None for row in rows)}
    absent |= set() if moved else {"bytes ×", "DRAM bytes"}
    fields = worth_a_column(rows, ("batch_size", "seq_len", "model", *COMPARED, *REPEATS))
    beside_method = [name for name in fields if name in EAGERLY]  # else a phone shows a method twice, and not why
    others = [name for name in fields if name not in beside_method]
    columns = {
        **{heading_of(name): _fields(rows, name) for name in ("method", *beside_method)},
        **{name: column.cells(rows, bars=True) for name, column in RATIOS.items() if name not in absent},
        **{"sequence" if name == "seq_len" else heading_of(name): _fields(rows, name) for name in others},
        **{name: column.cells(rows) for name, column in ABSOLUTES.items() if name not in absent},
        "status": [TableCell(row.result.status, row.result.status, number=False) for row in rows],
    }
    looks, lines = looks_of(rows), list(zip(*columns.values(), strict=True))
    return RowsTable(
        columns=[(name, cells[0].number) for name, cells in columns.items() if cells],
        lines=[(row, looks[row.method]["colour"], list(line)) for row, line in zip(rows, lines, strict=True)],
        choices={name: list(dict.fromkeys(map(choice, rows))) for name, choice in FILTERS.items()},
        csv=_csv(rows, with_traffic=moved),
    )


def _fields(rows: Sequence[Row], name: str) -> list[TableCell]:
    """Return the cells of a row; numbers sort as numbers."""
    cells = []
    for row in rows:
        text, value = row.cell(name), row.field(name)
        is_text = isinstance(value, str | bool)
        cells.append(TableCell(text, text if is_text else "" if value is None else value, number=not is_text))
    return cells


def _csv(rows: Sequence[Row], *, with_traffic: bool) -> dict[str, Any]:
    records = to_records(rows)
    moved = {"dram_bytes": "dram_bytes", "dram_bytes_ratio": "ratio", "dram_bytes_source": "source"}
    for row, record in zip(rows, records if with_traffic else (), strict=False):
        record |= {column: getattr(traffic_of(row), name, None) for column, name in moved.items()}
    return {"columns": list(records[0]) if records else [], "rows": [list(record.values()) for record in records]}
