"""From results to one HTML file: text through a template that escapes it, figures as data for the charts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from dpscope.reports.page.charts import make_charts
from dpscope.reports.tables import compare_results
from dpscope.results.schema import Result
from dpscope.results.store import Skipped, write_atomically

PAGE = "report.html"
HERE = Path(__file__).parent


def write_page(results: Sequence[Result], folder: Path, *, skipped: Sequence[Skipped] = ()) -> list[Path]:
    path = folder / PAGE
    write_atomically(path, render_page(results, skipped))
    return [path]


def render_page(results: Sequence[Result], skipped: Sequence[Skipped] = ()) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    rows = compare_results(results)
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    scripts = [_text("vendor/echarts.common.min.js"), _own_script()]
    return environment.get_template("page.html.jinja").render(
        charts=[chart.to_dict() for chart in make_charts(rows)],
        style=_text("static/page.css"),
        scripts=scripts,
        # Nothing may be loaded, and no script may run but these two: whatever a result's text holds.
        script_hashes=" ".join(f"'sha256-{_digest(script)}'" for script in scripts),
        skipped=skipped,
    )


def _own_script() -> str:
    """The page's own script: what drawings share, the drawings, and at last what sets them up."""
    drawings = sorted(path.name for path in (HERE / "static/drawings").glob("*.js"))
    names = ("shared.js", "layout.js", *(f"drawings/{name}" for name in drawings), "page.js")
    return '"use strict";\n' + "\n".join(_text(f"static/{name}") for name in names)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
