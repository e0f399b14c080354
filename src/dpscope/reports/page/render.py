"""The page as one HTML file: text through a template that escapes it, figures as data for the charts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpscope.reports.doubt import MARK
from dpscope.reports.memory.charts import memory_peak, memory_timeline, tensors_at_peak
from dpscope.reports.memory.text import TRIFLE
from dpscope.reports.output import text_output
from dpscope.reports.page.chart import Chart, ChartOf
from dpscope.reports.page.missing import find_missing
from dpscope.reports.page.sections import describe_configuration, files_beside, first_size, make_cards
from dpscope.reports.page.table import make_table
from dpscope.reports.palette import BLANK, INK, ON_DARK, looks_of
from dpscope.reports.report import Report, Setting
from dpscope.reports.text import TITLE, notes
from dpscope.reports.time.charts import scaling_over_batch, scaling_over_sequence, step_time, tradeoff
from dpscope.reports.trace.charts import operators, phases
from dpscope.reports.trace.layers_chart import layers_memory, layers_time
from dpscope.reports.traffic.charts import roofline, traffic
from dpscope.reports.traffic.data import APPROXIMATELY
from dpscope.units import GIB, KIB, MIB, MISSING
from dpscope.vocabulary.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


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
