"""Charts read numbers as tables do, and name in their legends what Python holds to be worth a name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dpscope.reports.memory.text import TRIFLE
from dpscope.units import format_bytes, format_ms, format_rate, format_ratio, format_traffic
from tests.browser.reading import chart_at, view_of

if TYPE_CHECKING:
    from playwright.sync_api import Page

    Reads = Callable[[Path], Page]

LEGEND_JS = "drawing => echarts.getInstanceByDom(drawing).getOption().legend[0].data.map((entry) => entry.name)"
FORMATS = {
    "bytes": format_bytes,
    "ms": format_ms,
    "traffic": format_traffic,
    "ratio": format_ratio,
    "rate": lambda value: format_rate(value, "undefined"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_figure_is_written_as_in_the_summary(name: str, h200_page: Path, read_page: Reads) -> None:
    values = [factor * 10.0**power for power in range(-2, 13) for factor in (0, 1, 1.26, 4.9996, 9.97)]
    values += [1023, 1024, 2**20 / 20, 2**20, 2**30 - 2**20 / 19, 2**30, 9_999.4, 10_000.1]
    written = read_page(h200_page).evaluate(f"values => values.map((value) => format.{name}(value))", values)
    assert written == [FORMATS[name](value) for value in values]


def test_a_legend_names_components_that_are_more_than_a_trifle(h200_page: Path, read_page: Reads) -> None:
    page = read_page(h200_page)
    chart, drawing = chart_at(page, "memory-peak")
    data = view_of(page, chart)["data"]
    shares = [max(abs(bar["bytes"][n]) / bar["total"] for bar in data["bars"]) for n in range(len(data["components"]))]
    named = [each["label"] for each, share in zip(data["components"], shares, strict=True) if share >= TRIFLE]
    assert 0 < len(named) < len(shares), "the page has both kinds of components"
    assert drawing.evaluate(LEGEND_JS) == named
