"""The table and the sentences a person reads, on a terminal and in summary.txt alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.plain_text import SUMMARY_WIDTH, render_plain
from dpscope.reports.bars import Bars, WithBars
from dpscope.reports.doubt import explain, marked
from dpscope.reports.memory.tensors import tensor_section
from dpscope.reports.memory.text import memory_section, snapshot_section
from dpscope.reports.output import text_output
from dpscope.reports.report import Report
from dpscope.reports.tables import SIZES, SPEEDS, Row, group_by_size, heading_of, worth_a_column
from dpscope.reports.text_table import field_cells
from dpscope.reports.trace.nsys_text import nsys_section
from dpscope.reports.trace.text import trace_section
from dpscope.reports.traffic.text import traffic_section
from dpscope.reports.words import peak_notes
from dpscope.units import GIB, MISSING, format_bytes, format_ms, format_ratio, format_throughput
from dpscope.vocabulary.settings import COMPARED, REPEATS, SETTINGS
from dpscope.vocabulary.statuses import status_named

TITLE = "What privacy costs"
NARROW_SUMMARY = 86  # columns
LEAST_WIDTH = {"batch": 5, "seq": 3, "warmup": 6, "steps": 5}  # of columns that hold numbers


def summary(report: Report, *, width: int = SUMMARY_WIDTH, detailed: bool = False) -> RenderableType:
    """Everything there is to say about a set of results; `detailed` for readers who have the time."""
    parts: list[RenderableType] = [Text(line, style="bold") for line in _headline(report)]
    if lines := _cost(report, width):
        parts += ["", *lines]
    for section, instrument in {**SECTIONS, **(DETAILS if detailed else {})}.items():
        if lines := section(report.rows_of(instrument), width):
            parts += ["", *lines]
    parts += [Text(line) for line in _troubles(report)]
    parts += [Text(f"Left out: {item.path.name}: {item.reason}", style="yellow") for item in report.skipped]
    return Group(*parts)


def _cost(report: Report, width: int) -> list[RenderableType]:
    """Time and peak memory of every row, and what the figures say."""
    rows = report.rows
    if not any(row.timing or row.memory or not row.result.ok for row in rows):
        return []
    ratios = [ratio for row in rows for ratio in (row.time_ratio, row.memory_ratio)]
    forms = [(True, 0)] if width < NARROW_SUMMARY else [(False, 2), (False, 1), (False, 0), (True, 0)]
    parts: list[RenderableType] = [WithBars([partial(_table, report, *form) for form in forms], ratios)]
    if sentences := verdict(report):
        parts += ["", *(Text(sentence) for sentence in sentences)]
    return [*parts, "", *(Text(note, style="dim") for note in notes(rows))]


# What a summary is made of after the costs, in this order, and whose results it tells. A section without anything to
# say is empty.
Section = Callable[[Sequence[Row], int], list[RenderableType]]
SECTIONS: dict[Section, str] = {
    memory_section: "memory",
    tensor_section: "memory",
    trace_section: "trace",
    nsys_section: "nsys",
    traffic_section: "ncu",
}
DETAILS: dict[Section, str] = {snapshot_section: "memory"}  # for the file, where there is room


def _headline(report: Report) -> list[str]:
    lines = [f"{TITLE}: each method next to ordinary training (standard) of the same model"]
    lines += list(dict.fromkeys(_describe(row.looked_at) for row in report.rows))
    environments = [r.environment for r in report.results if r.environment]
    lines += list(dict.fromkeys(_describe_environment(environment) for environment in environments))
    return lines


def _describe(spec: dict[str, Any]) -> str:
    workload = spec["workload"]
    sizes = ", ".join(workload_sizes(workload))
    told = [SETTINGS[name] for name in COMPARED if name in spec]
    return (
        f"Model {workload['name']} ({sizes}); {', '.join(each.in_words(spec) for each in told)}; "
        f"{spec['warmup']} warm-up and {spec['steps']} timed step{'s' * (spec['steps'] != 1)}"
    )


def workload_sizes(workload: dict[str, Any]) -> Iterator[str]:
    """What describes a workload, and the numbers of what is nested in it (a model's own configuration)."""
    for name, value in workload.items():
        if name == "lora":
            yield f"LoRA r {value['r']}, alpha {value['alpha']} on {' '.join(value['target'])}"
        elif isinstance(value, dict):
            yield from (f"{key.replace('_', ' ')} {size}" for key, size in value.items() if _is_number(size))
        elif value is not None and name not in ("kind", "name", "sha256"):
            yield f"{name.replace('_', ' ')} {value}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _describe_environment(environment: dict[str, Any]) -> str:
    if environment.get("gpu"):
        memory = environment.get("gpu_memory_bytes", 0) / GIB
        where = f"{environment['gpu']} ({memory:.0f} GiB), CUDA {environment.get('cuda')}"
    else:
        threads = environment.get("threads")
        where = f"{environment.get('cpu')}, {threads} thread{'s' * (threads != 1)}"
    return f"On {where}; " + ", ".join(f"{name} {environment.get(name)}" for name in ("torch", "opacus", "dpscope"))


def _table(report: Report, narrow: bool, most_rates: int, bars: Bars) -> Table:
    """`most_rates`: columns for samples and tokens in a second; of one, it is tokens where there is a sequence."""
    rows = report.rows
    rates = [rate for rate in SPEEDS if any(SPEEDS[rate](row) is not None for row in rows)]
    columns: list[tuple[str, Callable[[Row], RenderableType]]] = [
        ("time" if narrow else "time/step", lambda row: marked(format_ms(row.median_ms), row.time_doubt)),
        *([] if narrow else [("p10–p90", _spread)]),
        *((rate, partial(_rate, rate)) for rate in (rates[-most_rates:] if most_rates else ())),
        ("×", lambda row: marked(format_ratio(row.time_ratio), row.ratio_doubt)),
        *bars.column(attrgetter("time_ratio")),
        ("memory" if narrow else "peak memory", lambda row: format_bytes(row.peak_bytes)),
        ("×", lambda row: format_ratio(row.memory_ratio)),
        *bars.column(attrgetter("memory_ratio")),
    ]
    if not narrow or not all(row.result.ok for row in rows):
        columns.append(("status", _status))
    table = Table(box=None, pad_edge=False, header_style="bold")
    fields = worth_a_column(rows, ("model", "method", *SIZES, *COMPARED, *REPEATS))
    # What tells rows apart keeps its place on the narrowest terminal; the spread is the first to go.
    for name in map(heading_of, fields):
        least = LEAST_WIDTH.get(name)
        table.add_column(name, justify="right" if least else "left", no_wrap=name != "model", min_width=least)
    for heading, _ in columns:
        least = {"": bars.cells, "status": 4}.get(heading)
        table.add_column(heading, justify="left" if least else "right", no_wrap=True, min_width=least)
    for group in group_by_size(rows):
        for row in group:
            table.add_row(*field_cells(row, fields), *(cell(row) for _, cell in columns), end_section=row is group[-1])
    return table


def _spread(row: Row) -> str:
    return MISSING if row.spread_ms is None else f"{row.spread_ms[0]:.1f}–{row.spread_ms[1]:.1f}"


def _rate(name: str, row: Row) -> str:
    return marked(format_throughput(SPEEDS[name](row)), row.time_doubt)


def _status(row: Row) -> Text:
    return Text(row.result.status, style="green" if row.result.ok else "bold red")


def _troubles(report: Report) -> list[str]:
    """A line for each reason why rows have no figures: what became of which, and what to do."""
    alike: dict[tuple[str, str | None], dict[str, list[str]]] = {}  # status and reason -> method -> sizes
    for size in report.sizes:
        for row in size.rows:
            if not row.result.ok:
                methods = alike.setdefault((row.result.status, row.result.reason), {})
                methods.setdefault(row.method, []).append(size.label)
    lines = [f"{status}: {_which(methods)}: {reason}" for (status, reason), methods in alike.items()]
    return ["", *lines, *_own_tracebacks(report.rows)] if lines else []


def _which(methods: dict[str, list[str]]) -> str:
    """`flat, ghost at batch 4; batch 8`; methods that met it at other sizes stand for themselves."""
    at: dict[str, list[str]] = {}
    for method, sizes in methods.items():
        at.setdefault("; ".join(sizes), []).append(method)
    return ", ".join(f"{', '.join(names)} at {sizes}" for sizes, names in at.items())


def _own_tracebacks(rows: Sequence[Row]) -> list[str]:
    """Where the user's own code failed, each place once."""
    results = (row.result for row in rows if row.result.spec["workload"].get("kind") == "custom")
    shown = (result.details for result in results if status_named(result.status).shows_traceback)
    found = dict.fromkeys(filter(None, shown))
    return [line for details in found for line in ("", details.rstrip())]


def verdict(report: Report) -> list[str]:
    """What the figures come to, a paragraph for each size, and each note on rows once: the page's own sentences."""
    told = list(zip(report.sizes, report.stories, strict=True))
    paragraphs = [
        f"{size.label if size.setting else size.size.capitalize()}. {' '.join(story.sentences)}"
        for size, story in told
        if story.sentences
    ]
    return [*paragraphs, *dict.fromkeys(note for _, story in told for note in story.notes)]


def notes(rows: Sequence[Row]) -> list[str]:
    notes = ["× is the ratio to standard. Time: median over the timed steps, with 10th and 90th percentile."]
    if note := explain(row.ratio_doubt for row in rows):
        notes.append(note)
    if any(row.median_ms is not None and row.time_ratio is None for row in rows):
        notes.append(f"× is {MISSING} where standard has no figures at that size: measure it with --methods standard,…")
    return notes + peak_notes(row.peak_source for row in rows)


def files_written(paths: Sequence[Path]) -> str:
    return "\n".join(["Written:", *(f"  {path}" for path in paths)])


def _summary_text(report: Report) -> str:
    return render_plain(summary(report, detailed=True))


SUMMARY = text_output("summary.txt", "every table and sentence", _summary_text, mark=TITLE)
