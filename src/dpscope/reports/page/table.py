"""Sections of the page: the answer at each size, links to files, what was trained on what; the table of all rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from dpscope.reports.export import to_records
from dpscope.reports.looks import looks_of, spread_in_words
from dpscope.reports.report import Report, Setting, Size
from dpscope.reports.story import Story
from dpscope.reports.tables import EXPLAINED, SIZES, SPEEDS, Row, heading_of, marked, worth_a_column
from dpscope.reports.text import ranks_of, scaling_shown
from dpscope.reports.traffic.data import traffic_of
from dpscope.results.identity import Facts, days_of, differing_facts, facts_of, merge_facts
from dpscope.results.schema import Result
from dpscope.units import (
    MISSING,
    format_bytes,
    format_duration,
    format_ms,
    format_ratio,
    format_throughput,
    format_traffic,
)
from dpscope.vocabulary.settings import COMPARED, EAGERLY, REPEATS, SETTINGS
from dpscope.vocabulary.statuses import status_named
from dpscope.workloads.configs import workload_sizes

VERSIONS = ("torch", "Opacus", "dpscope")


def make_cards(size: Size, story: Story) -> list[dict[str, Any]]:
    """Return the card of a method: the winner has a badge; a method without figures says how it ended."""
    return [
        {
            **{"row": row, "colour": looks_of(size.rows)[row.method]["colour"], "figures": _figures(row)},
            "badge": story.badge if row.method == story.winner else "",
            "outcome": "" if row.result.ok else status_named(row.result.status).outcome,
        }
        for row in size.rows
    ]


def first_size(sizes: Sequence[Size]) -> int:
    """Return the size shown first: the one with the most figures, the largest of those."""

    def known(place: int) -> tuple[int, int, int, int]:
        rows = sizes[place].rows
        instruments = {result.instrument for row in rows for result in row.ended_well}
        figures = sum((row.median_ms is not None) + (row.peak_bytes is not None) for row in rows)
        return len(instruments), figures, rows[0].work, -place

    return max(range(len(sizes)), key=known, default=0)


def _figures(row: Row) -> list[dict[str, str]]:
    """Return ratios to ordinary training with the absolute figures below, and what makes one doubtful."""
    # `12.3 ms, 650 samples/s`; tokens where there is a sequence
    rates = [f"{format_throughput(speed)} {name}" for name, speed in row.speeds.items()]
    took = ", ".join(marked(text, row.time_doubt) for text in (format_ms(row.median_ms), *rates[-1:]))
    figures = [
        ("time", format_ratio(row.time_ratio), took, EXPLAINED.get(row.ratio_doubt, "")),
        ("memory", format_ratio(row.memory_ratio), format_bytes(row.peak_bytes), ""),
    ]
    if traffic := traffic_of(row):
        ratio, count = format_ratio(traffic.ratio), format_traffic(traffic.dram_bytes)
        figures.append(("DRAM bytes", traffic.show(ratio), traffic.show(count), ""))
    named = [dict(zip(("name", "ratio", "absolute", "doubt"), figure, strict=True)) for figure in figures]
    return [figure for figure in named if figure["absolute"] != MISSING]


def files_beside(report: Report) -> list[tuple[str, str, str, str]]:
    """Return row, instrument, name and link of files that exist now; none without a known folder."""
    found = [
        (f"{row.method}, {size.label}", instrument, PurePosixPath(path).name, quote(path))
        for size in report.sizes
        for row in size.rows
        for instrument, result in row.measured.items()
        for path in result.files.values()
        if _is_below(path, report.folder)
    ]
    return list(dict.fromkeys(found))


def _is_below(path: object, folder: Path | None) -> bool:
    """Return whether a path is a file inside the folder: results may come from anyone and name any path."""
    if folder is None or not isinstance(path, str) or "\0" in path:
        return False
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts and (folder / pure).is_file()


def describe_configuration(settings: Sequence[Setting], results: Sequence[Result]) -> dict[str, Any]:
    """Describe the configuration; `differing`: a warning about unlike environments; `summary`: all in a line."""
    shown = merge_facts([facts_of(result.environment) for result in results if result.environment])
    if measured := days_of(results):
        shown = [{**facts, "measured on": f"{measured} (UTC)"} for facts in shown] or [{"measured on": measured}]
    facts = [(setting.label, _setting(setting)) for setting in settings]
    differing = ", ".join(f"{name} ({' / '.join(found)})" for name, found in differing_facts(shown).items())
    warning = differing and (
        f"These results come from {len(shown)} environments, which differ in {differing}: a ratio between rows of "
        "different environments is not the cost of privacy alone."
    )
    told = {"differing": warning, "summary": _in_a_line(settings, shown)}
    return {"settings": facts, "environments": shown, **told}


def _in_a_line(settings: Sequence[Setting], environments: Sequence[Facts]) -> str:
    """Return `1b in bf16 on NVIDIA H200 (140 GiB); torch 2.11.0, Opacus 1.6.0, dpscope 0.1.0`."""
    specs = [setting.rows[0].spec for setting in settings]
    models = dict.fromkeys(f"{spec['workload']['name']} in {spec['dtype']}" for spec in specs)
    machines = dict.fromkeys(facts.get("GPU") or facts.get("CPU") or "an unknown machine" for facts in environments)
    versions = dict.fromkeys(f"{name} {facts[name]}" for name in VERSIONS for facts in environments if name in facts)
    where = [f"on {' and '.join(machines)}"] if machines else []
    return "; ".join(filter(None, (" ".join([", ".join(models), *where]), ", ".join(versions))))


def _setting(setting: Setting) -> Facts:
    spec = setting.rows[0].spec
    batches, lengths = (dict.fromkeys(row.spec.get(name) for row in setting.rows) for name in SIZES)
    repeats = [row.looked_at for row in setting.rows]
    steps = dict.fromkeys(f"{each['steps']} timed after {each['warmup']} of warm-up" for each in repeats)
    facts = {
        "Model": str(spec["workload"]["name"]),
        "Its size": ", ".join(workload_sizes(spec["workload"])),
        "Batch sizes": ", ".join(map(str, batches)),
        "Sequence lengths": ", ".join(str(length) for length in lengths if length),
        **{each.heading: each.cell(spec) for each in SETTINGS.values() if each.heading and each.name in spec},
        "Steps": ", ".join(steps),
    }
    if "learning_rate" in spec:
        facts[SETTINGS["optimizer"].heading] += f", learning rate {spec['learning_rate']:g}"
    return {name: text for name, text in facts.items() if text}


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
        traffic_of,
        "dram_bytes",
        lambda moved: moved.show(format_traffic(moved.dram_bytes)),
        "not counted: dpscope ncu",
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
