"""The table of all rows: what a reader sees of each, what a column sorts by, and the same unrounded for CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpscope.reports.doubt import marked
from dpscope.reports.export import to_records
from dpscope.reports.page.looks import looks_of
from dpscope.reports.report import Report
from dpscope.reports.tables import RATES, Rate, Row, worth_a_column
from dpscope.reports.traffic.data import Traffic, traffic_of
from dpscope.reports.words import size_in_words
from dpscope.units import MISSING, format_bytes, format_ms, format_ratio, format_throughput, format_traffic
from dpscope.vocabulary.settings import COMPARED, REPEATS, SETTINGS, SettingField

NO_STANDARD = "standard has no such figure at this size"


@dataclass(frozen=True)
class TableCell:
    text: str
    value: str | float  # what its column sorts by; "" where there is nothing
    why: str = ""  # why it is missing
    share: float | None = None  # of the column's largest ratio: the length of its bar
    number: bool = True


@dataclass(frozen=True)
class TableRow:
    method: str
    status: str
    size: str
    colour: str
    reason: str
    cells: list[TableCell]


@dataclass(frozen=True)
class RowsTable:
    columns: list[tuple[str, bool]]  # heading, and whether it holds numbers
    rows: list[TableRow]
    csv: dict[str, Any] = field(default_factory=dict)

    def choices(self, name: str) -> list[str]:
        return list(dict.fromkeys(getattr(row, name) for row in self.rows))


def make_table(report: Report) -> RowsTable:
    ordered = [row for size in report.sizes for row in size.rows]
    traffics = {id(row): traffic for row in ordered if (traffic := traffic_of(row))}
    settings = [SETTINGS[name] for name in worth_a_column(ordered, (*COMPARED, *REPEATS))]
    models = len({row.first.spec["workload"]["name"] for row in ordered}) > 1
    sequences = any(row.first.spec.get("seq_len") for row in ordered)
    rates = {name: rate for name, rate in RATES.items() if any(rate(row) is not None for row in ordered)}
    made = [
        {
            # What is compared comes first: on a phone the rest is a scroll away.
            "method": _text(row.method),
            **_ratios(row, traffics),
            "batch": _count(row.first.spec["batch_size"]),
            **({"sequence": _count(row.first.spec.get("seq_len"))} if sequences else {}),
            **({"model": _text(row.first.spec["workload"]["name"])} if models else {}),
            **{each.column: _setting(each, {**row.first.spec, **row.repeats}) for each in settings},
            **_absolutes(row, traffics, rates),
            "status": TableCell(row.result.status, row.result.status, number=False),
        }
        for row in ordered
    ]
    _add_bars(made)
    looks = looks_of(ordered)
    columns = [(name, cell.number) for name, cell in made[0].items()] if made else []
    lines = [
        TableRow(
            row.method,
            row.result.status,
            size_in_words(row.first.spec),
            looks[row.method]["colour"],
            row.result.reason or "",
            list(cells.values()),
        )
        for row, cells in zip(ordered, made, strict=True)
    ]
    return RowsTable(columns, lines, _csv(ordered, traffics))


def _text(value: object) -> TableCell:
    return TableCell(str(value), str(value), number=False)


def _count(value: int | None) -> TableCell:
    return TableCell(MISSING, "") if value is None else TableCell(str(value), value)


def _setting(setting: SettingField, spec: Mapping[str, Any]) -> TableCell:
    value = setting.of(spec)
    return _text(setting.cell(spec)) if isinstance(value, str | bool) else TableCell(setting.cell(spec), value)


def _ratios(row: Row, traffics: Mapping[int, Traffic]) -> dict[str, TableCell]:
    failed = _failure(row)
    time = marked(format_ratio(row.time_ratio), row.ratio_doubt)
    cells = {
        "time ×": _figure(row.time_ratio, time, failed or NO_STANDARD),
        "memory ×": _figure(row.memory_ratio, format_ratio(row.memory_ratio), failed or NO_STANDARD),
    }
    if traffics:
        traffic = traffics.get(id(row))
        ratio = traffic.ratio if traffic else None
        cells["bytes ×"] = _figure(ratio, _moved(traffic, format_ratio(ratio)), failed or NO_STANDARD)
    return cells


def _absolutes(row: Row, traffics: Mapping[int, Traffic], rates: Mapping[str, Rate]) -> dict[str, TableCell]:
    ms, peak, failed = row.median_ms, row.peak_bytes, _failure(row)
    spread = "" if row.spread_ms is None else f"{row.spread_ms[0]:.1f}–{row.spread_ms[1]:.1f}"
    cells = {
        "time a step": _figure(ms, marked(format_ms(ms), row.time_doubt), failed or "not timed"),
        "p10–p90, ms": _figure(row.spread_ms and row.spread_ms[0], spread, failed or "not timed"),
        **{name: _rate(rate(row), row, failed) for name, rate in rates.items()},
        "peak memory": _figure(peak, format_bytes(peak), failed or "not measured"),
    }
    if traffics:
        traffic = traffics.get(id(row))
        count = traffic.dram_bytes if traffic else None
        why = failed or "not counted: dpscope ncu"
        cells["DRAM bytes"] = _figure(count, _moved(traffic, format_traffic(count)), why)
    return cells


def _rate(value: float | None, row: Row, failed: str) -> TableCell:
    return _figure(value, marked(format_throughput(value), row.time_doubt), failed or "not timed")


def _failure(row: Row) -> str:
    return "" if row.result.ok else f"{row.result.status}: {row.result.reason}"


def _moved(traffic: Traffic | None, text: str) -> str:
    return traffic.show(text) if traffic else text


def _figure(value: float | None, text: str, why: str) -> TableCell:
    return TableCell(MISSING, "", why) if value is None else TableCell(text, value)


def _add_bars(made: Sequence[dict[str, TableCell]]) -> None:
    """A bar beside each ratio, as long as it is of its column's largest."""
    for name in ("time ×", "memory ×", "bytes ×"):
        known = [cells[name] for cells in made if name in cells and isinstance(cells[name].value, float)]
        largest = max((float(cell.value) for cell in known), default=0.0)
        for cells in made:
            cell = cells.get(name)
            if cell and isinstance(cell.value, float) and largest:
                cells[name] = TableCell(cell.text, cell.value, share=cell.value / largest)


def _csv(rows: Sequence[Row], traffics: dict[int, Traffic]) -> dict[str, Any]:
    records = to_records(rows)
    for row, record in zip(rows, records, strict=True):
        traffic = traffics.get(id(row))
        if traffics:
            record["dram_bytes"] = traffic.dram_bytes if traffic else None
            record["dram_bytes_ratio"] = traffic.ratio if traffic else None
            record["dram_bytes_source"] = traffic.source if traffic else None
    columns = list(records[0]) if records else []
    return {"columns": columns, "rows": [[record[name] for name in columns] for record in records]}
