"""Charts answer a reader: tooltips with figures, a choice of size, zoom, a theme, and files to take away."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from .reading import (
    chart_at,
    colours_in,
    data_of,
    drawings_of,
    figures_in,
    hover,
    numbers_in,
    save,
    tooltips,
    view_of,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

SVG = "{http://www.w3.org/2000/svg}"
RANGE_JS = """drawing => {
  const [{ start, end }] = echarts.getInstanceByDom(drawing).getOption().dataZoom;
  return [start, end];
}"""


@pytest.mark.parametrize("made_of", ["cpu_page", "h200_page"])
def test_a_tooltip_tells_figures_that_were_measured(
    made_of: str, request: pytest.FixtureRequest, open_page: Callable[..., Page]
) -> None:
    page = open_page(request.getfixturevalue(made_of))
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
    cpu_page: Path, measured: list[Any], open_page: Callable[..., Page]
) -> None:
    page = open_page(cpu_page)
    chart, drawing = chart_at(page, "step-time")
    view = view_of(page, chart)
    medians = {
        result.experiment: result.timing["median_ms"]
        for result in measured
        if result.instrument == "time"
        and f"batch {result.spec['batch_size']}, sequence {result.spec['seq_len']}" == view["size"]
    }
    told = tooltips(page, drawing)
    for method, median in medians.items():
        ratio = median / medians["standard"]
        assert any(method in text and f"{median:.1f} ms" in text and f"{ratio:.2f}×" in text for text in told), (
            f"{method} {median} in none of {told}"
        )


def test_choosing_a_size_changes_what_charts_say_and_draw(cpu_page: Path, open_page: Callable[..., Page]) -> None:
    page = open_page(cpu_page)
    seen: dict[str, list[str]] = {}
    for size in range(len(data_of(page)["sizes"])):
        page.locator("#size").select_option(index=size)
        for chart, drawing in drawings_of(page):
            view = view_of(page, chart)
            assert page.locator(f"[id='{chart['key']}'] .says").inner_text() == view["says"]
            if view["size"]:
                seen.setdefault(chart["key"], []).append(drawing.locator("svg").first.inner_html())
    assert len(seen["step-time"]) == 3
    for key, pictures in seen.items():
        assert len(set(pictures)) == len(pictures), f"{key}: the same drawing at another size"


@pytest.mark.parametrize("way", ["wheel", "button", "key"])
def test_the_timeline_can_be_zoomed(way: str, h200_page: Path, open_page: Callable[..., Page]) -> None:
    page = open_page(h200_page)
    chart, drawing = chart_at(page, "memory-timeline")
    whole = drawing.evaluate(RANGE_JS)
    box = drawing.bounding_box()
    assert box is not None
    if way == "wheel":
        page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 3)
        page.keyboard.down("Control")  # a wheel alone scrolls the page
        page.mouse.wheel(0, -300)
        page.keyboard.up("Control")
    elif way == "button":
        page.locator(f"[id='{chart['key']}'] [data-zoom='0.5']").click()
    else:
        drawing.focus()
        page.keyboard.press("+")
    page.wait_for_function(
        f"([drawing, whole]) => String(({RANGE_JS})(drawing)) !== String(whole)", arg=[drawing.element_handle(), whole]
    )
    start, end = drawing.evaluate(RANGE_JS)
    assert end - start < whole[1] - whole[0]


def test_the_theme_is_the_readers_and_charts_follow_it(cpu_page: Path, open_page: Callable[..., Page]) -> None:
    page = open_page(cpu_page)
    light = _look(page)
    page.locator("#theme").click()
    dark = _look(page)
    assert light.keys() == dark.keys()
    assert sum(_rgb(light["page"])) > 600
    assert sum(_rgb(dark["page"])) < 200, "the first press gives the other theme"
    for key, ink in light.items():
        assert ink != dark[key], f"{key} is drawn in the other theme's ink"


def test_a_reader_who_prefers_dark_pages_gets_one(cpu_page: Path, open_page: Callable[..., Page]) -> None:
    assert sum(_rgb(_look(open_page(cpu_page, color_scheme="dark"))["page"])) < 200


def _look(page: Page) -> dict[str, str]:
    """The page's background, and the ink of every drawing's first label."""
    inks = {
        chart["key"]: drawing.locator("svg text").first.evaluate("text => getComputedStyle(text).fill")
        for chart, drawing in drawings_of(page)
    }
    return {"page": page.evaluate("getComputedStyle(document.body).backgroundColor"), **inks}


def _rgb(colour: str) -> list[int]:
    return [int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]


@pytest.mark.parametrize("made_of", ["cpu_page", "h200_page", "hostile_page"])
def test_csv_buttons_save_every_figure_of_a_chart(
    made_of: str, request: pytest.FixtureRequest, open_page: Callable[..., Page]
) -> None:
    page = open_page(request.getfixturevalue(made_of))
    for chart, _ in drawings_of(page):
        name, content = save(page, chart, "csv")
        assert name.startswith(chart["key"])
        assert name.endswith(".csv")
        columns, *rows = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""))
        table = view_of(page, chart)["table"]
        assert columns == table["columns"]
        assert len(rows) == len(table["rows"]) > 0
        for saved, row in zip(rows, table["rows"], strict=True):
            assert [_plain(cell) for cell in saved] == [_plain(cell) for cell in row], chart["key"]


def test_the_csv_of_step_times_is_what_was_measured(
    cpu_page: Path, measured: list[Any], open_page: Callable[..., Page]
) -> None:
    page = open_page(cpu_page)
    chart, _ = chart_at(page, "step-time")
    rows = list(csv.DictReader(io.StringIO(save(page, chart, "csv")[1].decode())))
    size = view_of(page, chart)["size"]
    for result in measured:
        if (
            result.instrument == "time"
            and f"batch {result.spec['batch_size']}, sequence {result.spec['seq_len']}" == size
        ):
            row = next(row for row in rows if row["method"] == result.experiment)
            assert float(row["median_ms"]) == result.timing["median_ms"]
            assert float(row["p90_ms"]) == result.timing["p90_ms"]


def _plain(cell: object) -> object:
    """Numbers however they are written; texts without the mark that keeps spreadsheets from running them."""
    if cell is None:
        return ""
    try:
        return float(str(cell))
    except ValueError:
        text = str(cell)
        return text[1:] if text.startswith("'") and text[1:2] in ("=", "+", "-", "@") else text


@pytest.mark.parametrize("made_of", ["cpu_page", "hostile_page"])
def test_svg_buttons_save_pictures_that_say_what_they_show(
    made_of: str, request: pytest.FixtureRequest, open_page: Callable[..., Page]
) -> None:
    page = open_page(request.getfixturevalue(made_of))
    for chart, _ in drawings_of(page):
        name, content = save(page, chart, "svg")
        assert name.startswith(chart["key"])
        assert name.endswith(".svg")
        root = ElementTree.fromstring(content)
        assert root.tag == f"{SVG}svg"
        assert chart["title"] in "".join(root.itertext())
        assert len(list(root.iter(f"{SVG}path"))) >= 2
        assert not list(root.iter(f"{SVG}script"))


def test_png_buttons_save_pictures_sharp_enough_for_a_slide(h200_page: Path, open_page: Callable[..., Page]) -> None:
    from PIL import Image

    page = open_page(h200_page)
    for chart, drawing in drawings_of(page):
        name, content = save(page, chart, "png")
        assert name.endswith(".png")
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        box = drawing.bounding_box()
        assert box is not None
        assert Image.open(io.BytesIO(content)).width >= 2 * box["width"], chart["key"]
        assert len(colours_in(content)) > 8, f"{chart['key']}: a blank picture"
