"""The tables and sentences a person reads, on a terminal and in summary.txt alike; rows of several processes too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.plain_text import SUMMARY_WIDTH, Bars, Column, FirstThatFits, render_plain, table_of
from dpscope.reports.looks import NUMBERS, identity_columns, peak_notes, spread_in_words
from dpscope.reports.output import Output, text_output
from dpscope.reports.report import Report
from dpscope.reports.story import compilation_notes
from dpscope.reports.tables import (
    BATCH_OF_A_RANK,
    BATCH_OF_A_STEP,
    SPEEDS,
    Row,
    explain,
    group_by_size,
    grouped,
    marked,
    once_a_row,
)
from dpscope.reports.traffic.data import APPROXIMATELY
from dpscope.results.derived import COLLECTIVES, RankCosts, ranks_in
from dpscope.units import GIB, MISSING, format_bytes, format_ms, format_ratio
from dpscope.vocabulary.instruments import DETAILS, SECTIONS
from dpscope.vocabulary.settings import COMPARED, REPEATS, SETTINGS
from dpscope.vocabulary.statuses import status_named
from dpscope.workloads.configs import workload_sizes

OVER_RANKS = "Over several processes: bytes and peaks by rank"
SIMULATED_RANK = "One rank of a simulated world: nothing travels, and what sending takes is computed"
COLLECTIVE_NOTE = (
    "Peak: least and most of all ranks, and which rank needs most. Collectives: bytes of a step on one rank, those of "
    "the larger side of each. Share: how much of a profiled step had one under way, moving data or waiting for other "
    "ranks, on the rank that waited least."
)
SIMULATED_NOTE = (
    "≈: computed. Sending: bytes that a rank sends by the ring algorithm, over the stated bandwidth of its link. Step "
    "with it: if all of it were hidden behind computing, and if none were. Samples a second are those of one rank."
)


class RankView(NamedTuple):
    row: Row
    ranks: RankCosts


@once_a_row
def ranks_of(row: Row) -> RankCosts | None:
    """Return the costs of a row's ranks; None if it is of one process."""
    return row.first_of(ranks_in)


def rank_records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a record for each row, all with the same columns; empty records if no row has several processes."""
    found = [_record(row, ranks) if (ranks := ranks_of(row)) else {} for row in rows]
    names = dict.fromkeys(name for record in found for name in record)
    return [{name: record.get(name) for name in names} for record in found]


def _record(row: Row, ranks: RankCosts) -> dict[str, Any]:
    link, step = ranks.link, ranks.with_sending(row.median_ms)
    return {
        "ranks": ranks.world_size,
        "ranks_simulated": ranks.simulated,
        "slowest_rank": None if ranks.simulated else ranks.slowest,
        "rank_peak_least_bytes": min(ranks.peaks),
        "rank_peak_most_bytes": max(ranks.peaks),
        "rank_with_most_memory": None if ranks.simulated else ranks.largest,
        **{f"{name.replace('-', '_')}_bytes": size for name, size in ranks.bytes.items()},
        "sent_bytes": ranks.sent_bytes,
        "collective_share": ranks.share,
        "scaling": row.scaling,
        "scaling_equal": row.scaling_batch or None,
        "computed_link_gbps": link and link["gbps"],
        "computed_send_ms": link and link["send_ms"],
        "computed_step_hidden_ms": step and step[0],
        "computed_step_unhidden_ms": step and step[1],
    }


def ranks_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """Return ranks, collectives and scaling of every row over several processes."""
    views = [RankView(row, ranks) for row in rows if (ranks := ranks_of(row))]
    parts: list[RenderableType] = []
    for heading in (OVER_RANKS, SIMULATED_RANK):
        if found := [view for view in views if view.ranks.simulated is (heading == SIMULATED_RANK)]:
            identity: list[Column[RankView]] = identity_columns([view.row for view in found], lambda view: view.row)
            table = table_of(found, [*identity, *_rank_columns(found)], left={"method"})
            dim = [Text(note, style="dim") for note in _notes(found)]
            parts += [*([""] if parts else []), Text(heading, style="bold"), "", table, "", *dim]
    return parts


def _rank_columns(views: Sequence[RankView]) -> list[Column[RankView]]:
    """Return the columns of measured ranks, or of simulated ones: collectives stand between the others."""

    def collective(name: str) -> Column[RankView]:
        return name, lambda view: format_bytes(view.ranks.bytes.get(name))

    def sending(view: RankView) -> str:
        link = view.ranks.link
        return MISSING if link is None else f"{APPROXIMATELY}{format_ms(link['send_ms'])} at {link['gbps']:g} Gbit/s"

    def step(view: RankView) -> str:
        found = view.ranks.with_sending(view.row.median_ms)
        return MISSING if found is None else APPROXIMATELY + _range(*map(format_ms, found))

    def peaks(view: RankView) -> str:
        """Return `12.4 MiB`, or `12.4–15.8 MiB (0)` if ranks differ."""
        least, most = (format_bytes(choose(view.ranks.peaks)) for choose in (min, max))
        return most if least == most else f"{_range(least, most)} ({view.ranks.largest})"

    called = dict.fromkeys(name for view in views for name in view.ranks.bytes)
    collectives = [collective(name) for name in dict.fromkeys([*COLLECTIVES, *called]) if name in called]
    if views[0].ranks.simulated:
        ranks: Column[RankView] = ("ranks", lambda view: str(view.ranks.world_size))
        return [ranks, *collectives, ("sending", sending), ("step with it", step)]
    scaling: Column[RankView] = ("scaling", lambda view: scaling_shown(view.row))
    return [
        *(("slowest", lambda view: f"rank {view.ranks.slowest}"), ("peak (rank)", peaks), *collectives),
        ("share", lambda view: MISSING if view.ranks.share is None else f"{view.ranks.share:.0%}"),
        *([scaling] if any(view.row.scaling for view in views) else []),
    ]


def _range(low: str, high: str) -> str:
    """Return `85.0–85.8 ms`: the unit once if both have it."""
    return f"{low.removesuffix(' ' + high.rpartition(' ')[2])}–{high}"


def scaling_shown(row: Row) -> str:
    """Return `1.62× of 2`."""
    if row.scaling is None or row.alone is None:
        return MISSING
    return marked(f"{format_ratio(row.scaling)} of {row.field('gpus')}", row.time_doubt or row.alone.time_doubt)


def _notes(views: Sequence[RankView]) -> list[str]:
    if views[0].ranks.simulated:
        return [SIMULATED_NOTE]
    equal = dict.fromkeys(view.row.scaling_batch for view in views if view.row.scaling)
    told = {BATCH_OF_A_RANK: "as large a batch as one rank has", BATCH_OF_A_STEP: "the whole step's batch"}
    against = "Scaling: samples a second against the same method in one process with"
    return [COLLECTIVE_NOTE, *(f"{against} {told[each]}; n of n is perfect." for each in equal)]


TITLE = "What privacy costs"
NARROW_SUMMARY = 86  # columns


def summary(report: Report, *, width: int = SUMMARY_WIDTH, detailed: bool = False) -> RenderableType:
    """Return the summary of a set of results; `detailed` adds all sections."""
    parts: list[RenderableType] = [Text(line, style="bold") for line in _headline(report)]
    if lines := _cost(report, width):
        parts += ["", *lines]
    for instrument, where in [*SECTIONS, *(DETAILS if detailed else ())]:
        if lines := section_at(where)(report.rows_of(instrument), width):
            parts += ["", *lines]
    parts += [Text(line) for line in _troubles(report)]
    parts += [Text(f"Left out: {item.path.name}: {item.reason}", style="yellow") for item in report.skipped]
    return Group(*parts)


def section_at(where: str) -> Callable[[Sequence[Row], int], list[RenderableType]]:
    """Return the function that makes an instrument's section from rows and a width; its text may be empty."""
    module, _, name = where.partition(":")
    function: Callable[[Sequence[Row], int], list[RenderableType]]
    function = getattr(import_module(f"dpscope.reports.{module}"), name)
    return function


def _cost(report: Report, width: int) -> list[RenderableType]:
    """Time and peak memory of every row, and what the figures say."""
    rows = report.rows
    if not any(row.timing or row.memory or not row.result.ok for row in rows):
        return []
    ratios = [ratio for row in rows for ratio in (row.time_ratio, row.memory_ratio)]
    forms = [(True, 0)] if width < NARROW_SUMMARY else [(False, 2), (False, 1), (False, 0), (True, 0)]
    tables = FirstThatFits(lambda bars: (_table(report, *form, bars) for form in forms), ratios)
    parts: list[RenderableType] = [tables]
    if sentences := verdict(report):
        parts += ["", *map(Text, sentences)]
    return [*parts, "", *(Text(note, style="dim") for note in notes(rows))]


def _headline(report: Report) -> list[str]:
    environments = [result.environment for result in report.results if result.environment]
    return [
        f"{TITLE}: each method next to ordinary training (standard) of the same model",
        *dict.fromkeys(_describe(row.looked_at) for row in report.rows),
        *dict.fromkeys(map(_describe_environment, environments)),
    ]


def _describe(spec: dict[str, Any]) -> str:
    workload = spec["workload"]
    told = ", ".join(SETTINGS[name].in_words(spec) for name in COMPARED if name in spec)
    steps = f"{spec['warmup']} warm-up and {spec['steps']} timed step{'s' * (spec['steps'] != 1)}"
    return f"Model {workload['name']} ({', '.join(workload_sizes(workload))}); {told}; {steps}"


def _describe_environment(environment: dict[str, Any]) -> str:
    if environment.get("gpu"):
        memory = environment.get("gpu_memory_bytes", 0) / GIB
        where = f"{environment['gpu']} ({memory:.0f} GiB), CUDA {environment.get('cuda')}"
    else:
        threads = environment.get("threads")
        where = f"{environment.get('cpu')}, {threads} thread{'s' * (threads != 1)}"
    return f"On {where}; " + ", ".join(f"{name} {environment.get(name)}" for name in ("torch", "opacus", "dpscope"))


def _table(report: Report, narrow: bool, most_rates: int, bars: Bars) -> Table:
    """Return the main table; `most_rates`: columns for rates (of one, it is tokens if there is a sequence)."""
    rows = [row for group in group_by_size(report.rows) for row in group]
    rates = [rate for rate in SPEEDS if any(rate in row.speeds for row in rows)]
    identity: list[Column[Row]] = identity_columns(report.rows, lambda row: row, REPEATS)
    columns: list[Column[Row]] = [
        *identity,
        ("time" if narrow else "time/step", attrgetter("time_shown")),
        *([] if narrow else [("p10–p90", lambda row: spread_in_words(row.spread_ms))]),
        *((rate, partial(Row.speed_shown, name=rate)) for rate in (rates[-most_rates:] if most_rates else ())),
        ("×", attrgetter("time_ratio_shown")),
        *bars.column(attrgetter("time_ratio")),
        *([("× eager", attrgetter("eager_time_ratio_shown"))] if any(row.eager_time_ratio for row in rows) else []),
        ("memory" if narrow else "peak memory", lambda row: format_bytes(row.peak_bytes)),
        ("×", lambda row: format_ratio(row.memory_ratio)),
        *bars.column(attrgetter("memory_ratio")),
    ]
    if not narrow or not all(row.result.ok for row in rows):
        columns.append(("status", lambda row: Text(row.result.status, "green" if row.result.ok else "bold red")))
    # What tells rows apart keeps its place on the narrowest terminal; the spread is the first to go.
    left = {"", "status", *(name for name, _ in identity if name not in NUMBERS)}
    return table_of(rows, columns, left=left, wrap={"model"}, least={**NUMBERS, "": bars.cells, "status": 4})


def _troubles(report: Report) -> list[str]:
    """Return a line for each reason why rows have no figures: which rows, how they ended, and the remedy."""
    failed = [(row, size.label) for size in report.sizes for row in size.rows if not row.result.ok]
    alike = grouped(failed, lambda each: (each[0].result.status, each[0].result.reason))
    lines = [f"{status}: {_which(found)}: {reason}" for (status, reason), found in alike.items()]
    # Where the user's own code failed, each place once.
    own = (row.result for row in report.rows if row.result.spec["workload"].get("kind") == "custom")
    shown = dict.fromkeys(result.details for result in own if status_named(result.status).shows_traceback)
    tracebacks = [line for details in shown if details for line in ("", details.rstrip())]
    return ["", *lines, *tracebacks] if lines else []


def _which(failed: Sequence[tuple[Row, str]]) -> str:
    """Return `flat, ghost at batch 4; batch 8`, with methods grouped by their sizes."""
    by_method = grouped(failed, lambda each: each[0].method)
    sizes = {method: "; ".join(size for _, size in own) for method, own in by_method.items()}
    return ", ".join(f"{', '.join(names)} at {where}" for where, names in grouped(sizes, sizes.__getitem__).items())


def verdict(report: Report) -> list[str]:
    """Return the conclusions, a paragraph for each size, and each note on rows once: the page's own sentences."""
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
    return notes + compilation_notes(rows) + peak_notes(row.peak_source for row in rows)


SUMMARY: Output[Report] = text_output(
    *("summary.txt", "every table and sentence", lambda report: render_plain(summary(report, detailed=True))),
    mark=TITLE,
)
