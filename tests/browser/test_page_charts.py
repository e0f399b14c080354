"""Charts answer a reader: tooltips with figures, a choice of size, zoom, and a theme."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dpscope.results.derived import PhaseSpan, Timeline
from dpscope.vocabulary.phases import BETWEEN_PHASES
from tests import ROOT
from tests.browser.reading import (
    ALL_DRAWN_JS,
    chart_at,
    data_of,
    drawings_of,
    figures_in,
    hover,
    numbers_in,
    tooltips,
    view_of,
)

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    Reads = Callable[[Path], Page]
    Opens = Callable[..., Page]

RANGE_JS = """drawing => {
  const [{ start, end }] = echarts.getInstanceByDom(drawing).getOption().dataZoom;
  return [start, end];
}"""


@pytest.mark.parametrize("made_of", ["h200_page", "against_page"])
def test_a_tooltip_tells_figures_that_were_measured(
    made_of: str, request: pytest.FixtureRequest, read_page: Reads
) -> None:
    page = read_page(request.getfixturevalue(made_of))
    for chart, drawing in drawings_of(page):
        text = hover(page, drawing)
        figures = figures_in(text)
        assert figures, f"{chart['key']}: no figure in the tooltip {text!r}"
        view = view_of(page, chart)
        known = list(numbers_in([view["data"], view["table"]["rows"]]))
        told = [any(abs(value - number) <= slack for number in known) for value, slack, _ in figures]
        assert any(told), f"{chart['key']}: {text!r} has none of the chart's figures"
        page.mouse.move(0, 0)


def test_a_bar_of_step_times_tells_the_median_and_the_ratio(
    cpu_page: Path, measured: list[Any], read_page: Reads
) -> None:
    page = read_page(cpu_page)
    chart, drawing = chart_at(page, "step-time")
    size = view_of(page, chart)["size"]
    medians = {
        result.experiment: result.timing["median_ms"]
        for result in measured
        if result.instrument == "time"
        and f"batch {result.spec['batch_size']}, sequence {result.spec['seq_len']}" == size
    }
    assert len(medians) == 3
    told = tooltips(page, drawing)
    for method, median in medians.items():
        ratio = median / medians["standard"]
        assert any(method in text and f"{median:.1f} ms" in text and f"{ratio:.2f}×" in text for text in told), (
            f"{method} {median} in none of {told}"
        )


def test_a_tooltip_of_the_timeline_and_timeline_csv_have_one_phase_for_each_event(
    cpu_page: Path, read_page: Reads
) -> None:
    spans = [("forward", 2, 4), ("backward", 4, 10), ("clip", 6, 8), ("optimizer", 12, 14)]
    timeline = Timeline(list(range(15)), {"gradients": [0] * 15}, [PhaseSpan(*span) for span in spans])
    panel = {"events": timeline.events, "phases": [[*stretch, ""] for stretch in timeline.stretches]}
    page = read_page(cpu_page)
    source = (ROOT / "src/dpscope/reports/page/static/drawings/memory-timeline.js").read_text(encoding="utf-8")
    in_page = (
        f"panel => {{ const drawings = {{}};\n{source}\nreturn panel.events.map((each) => phaseAt(panel, each)) }}"
    )
    told = page.evaluate(in_page, panel)
    assert told == [timeline.phase_at(event) or BETWEEN_PHASES for event in timeline.events]


def test_choosing_a_size_changes_what_charts_say_and_draw(h200_page: Path, open_page: Opens) -> None:
    page = open_page(h200_page)
    pictures: dict[str, list[str]] = {}
    sizes = data_of(page)["sizes"]
    for index, size in enumerate(sizes):
        page.locator("#size").select_option(index=index)
        page.wait_for_function(ALL_DRAWN_JS)
        assert page.locator(".story:visible .where").inner_text().startswith(size["size"])
        for chart in data_of(page)["charts"]:
            figure = page.locator(f"[id='{chart['key']}']")
            views = {view["size"]: view for view in chart["views"]}
            view = views.get("", views.get(size["size"]))
            said = figure.locator(".says").inner_text()
            assert said == view["says"] if view else said.startswith(f"Not measured at {size['size']}")
            assert figure.locator(".drawing").is_visible() == bool(view)
            assert figure.locator("[data-save=csv]").is_enabled() == bool(view)
            if view and view["size"]:
                pictures.setdefault(chart["key"], []).append(figure.locator("svg").first.inner_html())
    assert {key: len(drawn) for key, drawn in pictures.items() if len(drawn) > 1} == {
        "step-time": 4,
        "traffic": 4,
        "roofline": 4,
    }
    for key, drawn in pictures.items():
        assert len(set(drawn)) == len(drawn), f"{key}: the same drawing at another size"


def _wheel(page: Page, figure: Locator, *, control: bool) -> None:
    box = figure.locator(".drawing").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 3)
    if control:
        page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")


ZOOMS: dict[str, Callable[[Page, Locator], object]] = {
    "wheel": lambda page, figure: _wheel(page, figure, control=True),
    "button": lambda page, figure: figure.get_by_role("button", name="Zoom in").click(),
    "key": lambda page, figure: figure.locator(".drawing").press("+"),
}


@pytest.mark.parametrize("way", ZOOMS)
def test_the_timeline_can_be_zoomed_and_shown_whole_again(way: str, h200_page: Path, read_page: Reads) -> None:
    page = read_page(h200_page)
    _, drawing = chart_at(page, "memory-timeline")
    figure = page.locator("#memory-timeline")
    assert drawing.evaluate(RANGE_JS) == [0, 100]
    ZOOMS[way](page, figure)
    page.wait_for_function(
        f"drawing => {{ const [start, end] = ({RANGE_JS})(drawing); return end - start < 95; }}",
        arg=drawing.element_handle(),
    )
    figure.get_by_role("button", name="Reset zoom").click()
    assert drawing.evaluate(RANGE_JS) == [0, 100]


def test_a_wheel_alone_scrolls_the_page_and_not_the_chart(h200_page: Path, read_page: Reads) -> None:
    page = read_page(h200_page)
    _, drawing = chart_at(page, "memory-timeline")
    before = page.evaluate("scrollY")
    _wheel(page, page.locator("#memory-timeline"), control=False)
    page.wait_for_function("before => scrollY < before", arg=before)
    assert drawing.evaluate(RANGE_JS) == [0, 100]


def test_only_charts_that_zoom_have_buttons_for_it(h200_page: Path, read_page: Reads) -> None:
    page = read_page(h200_page)
    with_buttons = page.locator("figure.chart:has([data-zoom]:not([hidden]))").evaluate_all(
        "all => all.map((f) => f.id)"
    )
    can = page.evaluate(
        "drawn.filter((each) => each.instance.getOption().dataZoom?.length).map((each) => each.chart.key)"
    )
    assert with_buttons == can == ["memory-timeline"]


def test_the_theme_is_the_readers_and_charts_follow_it(cpu_page: Path, open_page: Opens) -> None:
    page = open_page(cpu_page)
    light = _look(page)
    page.locator("#theme").press("Enter")
    dark = _look(page)
    assert light.keys() == dark.keys()
    assert sum(_rgb(light["page"])) > 600
    assert sum(_rgb(dark["page"])) < 200, "the first press gives the other theme"
    for key, ink in light.items():
        assert ink != dark[key], f"{key} is drawn in the other theme's ink"
    page.reload()
    assert _look(page) == dark, "it is remembered"


def test_a_reader_who_prefers_dark_pages_gets_one(cpu_page: Path, open_page: Opens) -> None:
    assert sum(_rgb(_look(open_page(cpu_page, color_scheme="dark"))["page"])) < 200


def _look(page: Page) -> dict[str, str]:
    """The page's background, and the ink of every drawing's first label."""
    page.wait_for_function(ALL_DRAWN_JS)
    inks: dict[str, str] = page.evaluate("""() => Object.fromEntries(
      [...document.querySelectorAll("figure.chart:has(svg text)")].map((figure) =>
        [figure.id, getComputedStyle(figure.querySelector("svg text")).fill]))""")
    return {"page": page.evaluate("getComputedStyle(document.body).backgroundColor"), **inks}


def _rgb(colour: str) -> list[int]:
    return [int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
