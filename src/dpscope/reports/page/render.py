"""The page as one HTML file: text through a template that escapes it, figures as data for the charts.

What is missing is on the page too: rows that failed, files that were left out, instruments that were not used, with
commands that measure exactly that, derived from the specs in the results.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpscope.reports.looks import BLANK, INK, ON_DARK, looks_of
from dpscope.reports.memory.figures import memory_peak, memory_timeline, tensors_at_peak
from dpscope.reports.memory.text import TRIFLE
from dpscope.reports.output import text_output
from dpscope.reports.page.chart import Chart, ChartOf
from dpscope.reports.page.table import describe_configuration, files_beside, first_size, make_cards, make_table
from dpscope.reports.report import Report, Setting, Size
from dpscope.reports.tables import MARK, SIZES, grouped
from dpscope.reports.text import TITLE, notes
from dpscope.reports.time_charts import scaling_over_batch, scaling_over_sequence, step_time, tradeoff
from dpscope.reports.trace.figures import operators, phases
from dpscope.reports.trace.layers_chart import layers_memory, layers_time
from dpscope.reports.traffic.data import APPROXIMATELY
from dpscope.reports.traffic.figures import roofline, traffic
from dpscope.results.identity import hashable, identity_of
from dpscope.units import GIB, KIB, MIB, MISSING
from dpscope.vocabulary.instruments import INSTRUMENTS
from dpscope.vocabulary.settings import FLAGS, flags_of
from dpscope.vocabulary.version import __version__
from dpscope.workloads.configs import import_root, workload_flags

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


RowSpec = Mapping[str, Any]
SizeOf = tuple[int, int | None]  # batch, sequence


def command_lines(specs: Sequence[RowSpec]) -> list[str]:
    """Return the fewest commands that measure each spec exactly once, to run in the results' folder.

    A command measures all combinations of its methods, batch sizes and sequence lengths, so only sizes that form a
    whole product share one. Specs that no command can express (see `can_be_typed`) have none.
    """
    beside = dict.fromkeys(("method", *SIZES))  # what the specs of one command may differ in
    groups = grouped(filter(can_be_typed, specs), lambda spec: json.dumps({**spec, **beside}, sort_keys=True))
    lines = []
    for group in groups.values():
        at_size = grouped(group, lambda spec: (spec["batch_size"], spec.get("seq_len")))
        methods = {size: tuple(dict.fromkeys(spec["method"] for spec in own)) for size, own in at_size.items()}
        sizes_by_methods = grouped(sorted(methods, key=lambda size: (size[0], size[1] or 0)), methods.__getitem__)
        for names, sizes in sizes_by_methods.items():
            lines += [_line(group[0], names, batches, lengths) for batches, lengths in products(sizes)]
    return lines


def can_be_typed(spec: RowSpec) -> bool:
    """Return whether a command exists for this spec: not for a model made in Python, nor for a name with a comma."""
    return workload_flags(spec["workload"]) is not None and "," not in spec["method"]


def products(sizes: Iterable[SizeOf]) -> list[tuple[tuple[int, ...], list[int | None]]]:
    """Return the sizes as products of batch sizes and sequence lengths that hold each size once, and no other."""
    at_length = {
        length: tuple(batch for batch, _ in own) for length, own in grouped(sizes, lambda size: size[1]).items()
    }
    alike = grouped(at_length, lambda length: (length is None, at_length[length]))
    return [(batches, lengths) for (_, batches), lengths in alike.items()]


def _line(spec: RowSpec, methods: Sequence[str], batches: Sequence[int], lengths: Sequence[int | None]) -> str:
    lists = {"methods": methods, "batch_size": batches, "seq_len": [length for length in lengths if length]}
    told = {name: ",".join(map(str, values)) for name, values in lists.items() if values}
    told |= {name: spec[name] for name in FLAGS if name in spec}
    # `compare` for one instrument alone, or the instrument's own subcommand for its options.
    instrument, options = spec["instrument"], spec.get("options") or {}
    log = ["--no-log"] if instrument == "trace" else []  # which is no part of the results
    command = [instrument, *flags_of(options), *log] if options else ["compare", "--instruments", instrument]
    words = [*command, *(workload_flags(spec["workload"]) or ()), *flags_of(told), "--out", ".", "--resume"]
    root = import_root(spec["workload"])
    return " ".join([*([f"PYTHONPATH={_quote(root)}:$PYTHONPATH"] if root else []), "dpscope", *map(_quote, words)])


def _quote(word: str) -> str:
    """Quote a word for a shell, except a leading ~, which the shell replaces by the home folder."""
    home, slash, rest = word.partition("/")
    if home != "~":
        return shlex.quote(word)
    return home + slash + (shlex.quote(rest) if rest else "")


# Instruments in the order in which they are missed: those that need tools of their own come last.
IN_ORDER = sorted(INSTRUMENTS, key=lambda name: not INSTRUMENTS[name].works_everywhere)


@dataclass(frozen=True)
class InstrumentGap:
    """Instrument without figures for some rows, and the commands that measure exactly those."""

    what: str
    where: str  # "" for nowhere on the page
    commands: list[str]
    untyped: str  # rows of models that were made in Python: no command can name them


@dataclass(frozen=True)
class Missing:
    failed: list[tuple[str, str, str, str]]  # method, size, status, reason
    skipped: list[tuple[str, str]]  # file, reason
    gaps: list[InstrumentGap]


Lacking = tuple[str, Size, dict[str, Any]]  # a method, where it was not looked at, the spec that would


def find_missing(report: Report) -> Missing:
    sizes = report.sizes
    failed = [
        (row.method, size.label, result.status, result.reason or "no reason given")
        for size in sizes
        for row in size.rows
        for result in row.measured.values()
        if not result.ok
    ]
    skipped = [(item.path.name, item.reason) for item in report.skipped]
    gaps = [gap for instrument in IN_ORDER if (gap := _gap(instrument, sizes))]
    return Missing(list(dict.fromkeys(failed)), skipped, gaps)


def _gap(instrument: str, sizes: Sequence[Size]) -> InstrumentGap | None:
    lacking = list(_lacking(instrument, sizes))
    if not lacking:
        return None
    everywhere = not any(instrument in row.measured for size in sizes for row in size.rows)
    about = INSTRUMENTS[instrument]
    specs = [spec for *_, spec in lacking]
    noted = about.cpu_note and all(spec.get("device") == "cpu" for spec in specs)
    return InstrumentGap(
        what=about.shows + (f" ({about.cpu_note})" if noted else ""),
        where="" if everywhere else _where(lacking),
        commands=command_lines(specs),
        untyped=_where([each for each in lacking if not can_be_typed(each[-1])]),
    )


def _lacking(instrument: str, sizes: Sequence[Size]) -> Iterator[Lacking]:
    """Yield the rows that the instrument could have measured but did not, each once.

    It cannot measure a row that failed, nor a row on a CPU if it needs a GPU.
    """
    seen: set[Hashable] = set()
    for size in sizes:
        for row in size.rows:
            row_of_any_steps = (row.method, hashable(identity_of(row.spec)))
            plain = row.measured.get("time")
            trains = plain.ok if plain is not None else all(result.ok for result in row.measured.values())
            works = trains and not (INSTRUMENTS[instrument].gpu_only and row.looked_at.get("device") == "cpu")
            if instrument in row.measured or row_of_any_steps in seen or not works:
                continue
            seen.add(row_of_any_steps)
            options = _options(instrument, size, sizes)
            yield row.method, size, {**row.looked_at, "instrument": instrument, "options": options}


def _options(instrument: str, size: Size, sizes: Sequence[Size]) -> dict[str, Any]:
    """Return the instrument's options for rows of this size or setting, so that compared rows are measured alike."""
    nearest = [size, *(other for other in sizes if other.setting == size.setting)]
    found = (row.measured[instrument].spec for near in nearest for row in near.rows if instrument in row.measured)
    return dict(next(found, {}).get("options") or {})


def _where(lacking: Sequence[Lacking], most: int = 4) -> str:
    """Return the sizes, and the missing methods if only some of a size were measured."""
    words = []
    for size, found in grouped(lacking, lambda each: each[1]).items():
        whole = len(found) == len({row.method for row in size.rows})
        words.append(size.label if whole else f"{size.label} ({', '.join(method for method, *_ in found)})")
    rest = f"; and {len(words) - most} more" if len(words) > most else ""
    return "; ".join(words[:most]) + rest


CONSTANTS: dict[str, Any] = {
    "units": {"KIB": KIB, "MIB": MIB, "GIB": GIB},
    "trifle": TRIFLE,  # a component that is never more of a peak has no place in a legend: the tooltip names it
    "marks": {"missing": MISSING, "doubt": MARK, "estimate": APPROXIMATELY},
    "colours": {"ink": INK, "blank": BLANK, "on_dark": ON_DARK},
}

CHARTS: tuple[ChartOf, ...] = (
    *(step_time, memory_peak, traffic, tradeoff),  # what it costs
    *(phases, operators, memory_timeline, tensors_at_peak, layers_memory, layers_time, roofline),  # where it goes
    *(scaling_over_batch, scaling_over_sequence),  # how it grows
)

GENERATOR = '<meta name="generator" content="dpscope'  # what a page begins with, so that it is known as ours
HERE = Path(__file__).parent
SHARED = ("shared.js", "layout.js")
SCRIPTS = ("save.js", "theme.js", "drawn.js", "rows.js", "page.js")  # after what drawings share, and the drawings


def render_page(
    report: Report, *, title: str = TITLE, before: Sequence[Markup] = (), charts: Sequence[Chart] | None = None
) -> str:
    """Render the page; `before`: trusted markup in the headline's place; `charts`: instead of the default ones."""
    scripts = [_text("vendor/echarts.common.min.js"), _own_script()]
    first: dict[str, Any] = report.rows[0].spec if report.rows else {}
    settings = list(dict.fromkeys(size.setting for size in report.sizes))
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    return render_template(
        "page.html.jinja",
        title=title,
        version=__version__,
        icon=_text("static/icon.svg").strip(),
        style=_text("static/page.css"),
        scripts=scripts,
        # Nothing may be loaded, and no script may run but these two: whatever a result's text holds.
        script_hashes=" ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests),
        sizes=[
            {"index": index, "setting": size.setting, "place": settings.index(size.setting), "size": size.size}
            for index, size in enumerate(report.sizes)
        ],
        first=first_size(report.sizes),
        headlines=[(*told, make_cards(*told)) for told in zip(report.sizes, report.stories, strict=True)],
        before=before,
        configuration=describe_configuration(report.settings, report.results),
        charts=[chart.to_dict() for chart in (make_charts(report.settings) if charts is None else charts)],
        methods={row.method: looks_of(report.rows)[row.method]["colour"] for row in report.rows},
        privacy={name: float(first.get(name, 1.0)) for name in ("noise_multiplier", "max_grad_norm")},
        beside=files_beside(report),
        table=make_table(report),
        constants=CONSTANTS,
        notes=notes(report.rows),
        missing=find_missing(report),
    )


def render_template(name: str, **values: Any) -> str:
    """Return a template of the page, filled in; what it is given is escaped."""
    return _templates().get_template(name).render(**values)


@cache
def _templates() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _own_script() -> str:
    """Return the page's own script: shared functions, the drawings, and the code that starts them."""
    drawings = sorted(f"drawings/{path.name}" for path in (HERE / "static/drawings").glob("*.js"))
    shared, own, last = ([_text(f"static/{name}") for name in names] for names in (SHARED, drawings, SCRIPTS))
    return "\n".join(('"use strict";', *shared, *(f"{{\n{script}}}" for script in own), *last))  # own: with own names


def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def make_charts(settings: Sequence[Setting]) -> list[Chart]:
    """Return each chart with its views by setting, because a size names one comparison only within a setting."""
    charts = []
    for make in CHARTS:
        if made := [(setting.label, chart) for setting in settings if (chart := make(setting.rows))]:
            first, views = made[0][1], []
            for label, chart in made:
                title = "" if chart.title == first.title else chart.title
                how = "" if chart.how == first.how else chart.how
                views += [replace(view, setting=label, title=title, how=how) for view in chart.views]
            charts.append(replace(first, views=views))
    return charts


PAGE = text_output("report.html", "everything as one page, for any browser", render_page, mark=GENERATOR)
