"""Names and figures stand at what they name: at every bar and point, on a desk and on a phone, struck by no line."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import sweeps
from tests.browser.reading import ALL_DRAWN_JS, COLLISIONS_JS, CUT_JS, chart_at, data_of, view_of

if TYPE_CHECKING:
    from playwright.sync_api import Page

    Reads = Callable[[Path], Page]
    Opens = Callable[..., Page]

PHONE, DESK = {"width": 390, "height": 800}, {"width": 1280, "height": 900}

# Texts of a drawing that a line goes through. (A text that is turned has a box that is larger than it.)
STRUCK_JS = """drawing => {
  const level = (text) => text.textContent.trim() && !text.getScreenCTM().b;
  const texts = [...drawing.querySelectorAll("svg text")].filter(level)
    .map((text) => [text.textContent, text.getBoundingClientRect()]);
  const lines = [...drawing.querySelectorAll("svg path, svg polyline, svg line")].filter((line) => {
    const { stroke, fill, strokeOpacity } = getComputedStyle(line);
    return stroke !== "none" && fill === "none" && Number(strokeOpacity) > 0;
  });
  const struck = new Set();
  for (const line of lines) {
    const length = line.getTotalLength(), matrix = line.getScreenCTM();
    for (let at = 0; at <= length; at += 1) {
      const { x, y } = line.getPointAtLength(at).matrixTransform(matrix);
      for (const [text, box] of texts)
        if (x > box.left + 1 && x < box.right - 1 && y > box.top + 2 && y < box.bottom - 2) struck.add(text);
    }
  }
  return [...struck];
}"""

TEXTS_JS = """drawing => [...drawing.querySelectorAll("svg text")].map((text) => text.textContent)"""

# Pixels from the end of each bar of a step's time to its figure.
FIGURES_JS = """drawing => {
  const { instance, view } = drawn.find((each) => each.drawing === drawing);
  const left = drawing.getBoundingClientRect().left;
  return view.data.bars.map((bar) => {
    const figure = `${format.ms(bar.median_ms)}`;
    const text = [...drawing.querySelectorAll("svg text")].find((each) => each.textContent.startsWith(figure));
    return text.getBoundingClientRect().left - left - instance.convertToPixel({ xAxisIndex: 0 }, bar.median_ms);
  });
}"""


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_every_point_has_its_name_and_no_line_strikes_one(
    viewport: dict[str, int], h200_page: Path, open_page: Opens
) -> None:
    page = open_page(h200_page, viewport=viewport)
    page.wait_for_function(ALL_DRAWN_JS)
    for key in ("tradeoff", "roofline"):
        chart, drawing = chart_at(page, key)
        texts = drawing.evaluate(TEXTS_JS)
        for name in _names(view_of(page, chart)["data"]):
            assert name in texts, f"{key}: no {name}"
            texts.remove(name)
        assert not (struck := drawing.evaluate(STRUCK_JS)), f"{key}: {struck}"
        assert not (cut := drawing.evaluate(CUT_JS)), f"{key}: {cut}"
        assert not (found := drawing.evaluate(COLLISIONS_JS)), f"{key}: {found}"


def _names(data: dict[str, Any]) -> list[str]:
    """What has to be read beside points: sizes, methods, and the numbers of kernels."""
    if "lines" in data:
        return [point["short"] for line in data["lines"] for point in line["points"]]
    kernels = sum(point["kernel"] for point in data["points"])
    return [point["name"] for point in data["points"] if not point["kernel"]] + [str(n + 1) for n in range(kernels)]


# How far apart the crowds lie decides how much room there is. Times are given, as measured ones differ with the load.
@pytest.mark.parametrize(("flat", "flash"), [(1.5, 1.3), (3, 3), (10, 1.05), (20, 0.5)])
def test_sixteen_points_in_two_crowds_are_all_named_on_a_phone(
    flat: float, flash: float, measured: list[Any], page_from: Callable[..., Path], open_page: Opens
) -> None:
    first = {"flat": flat, "flash": flash}

    def slower(result: Any, place: int) -> Any:
        if not result.timing:
            return result
        ratio = first[result.experiment] * (1 + 0.07 * place) if result.experiment in first else 1
        return replace(result, timing={**result.timing, "median_ms": 10 * ratio})

    sized = [(place, result) for place in range(8) for result in sweeps.multiply(measured, [2**place])]
    page = open_page(page_from([slower(result, place) for place, result in sized]), viewport=PHONE)
    page.wait_for_function(ALL_DRAWN_JS)
    chart, drawing = chart_at(page, "tradeoff")
    texts = drawing.evaluate(TEXTS_JS)
    assert all(texts.count(name) == 2 for name in _names(view_of(page, chart)["data"])), texts
    assert not (found := drawing.evaluate(COLLISIONS_JS)), found


def test_where_two_hundred_sizes_leave_no_room_for_names_it_is_said(large_page: Path, open_page: Opens) -> None:
    page = open_page(large_page, viewport=PHONE)
    page.wait_for_function(ALL_DRAWN_JS)
    _, drawing = chart_at(page, "tradeoff")
    assert any("no room for a name: see Data" in text for text in drawing.evaluate(TEXTS_JS))
    assert not (found := drawing.evaluate(COLLISIONS_JS)), found


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_the_figure_of_a_time_stands_at_its_bar_however_far_a_step_lies_out(
    viewport: dict[str, int], measured: list[Any], page_from: Callable[..., Path], open_page: Opens
) -> None:
    def with_outlier(result: Any) -> Any:
        steps = [*result.timing["step_ms"], 12 * max(result.timing["step_ms"])]
        return replace(result, timing={**result.timing, "step_ms": steps})

    timed = [with_outlier(r) for r in sweeps.at(sweeps.FULL, measured) if r.instrument == "time"]
    page = open_page(page_from(timed), viewport=viewport)
    _, drawing = chart_at(page, "step-time")
    gaps = drawing.evaluate(FIGURES_JS)
    assert len(gaps) == len(timed)
    assert all(0 <= gap < 12 for gap in gaps), gaps
    assert not (struck := drawing.evaluate(CUT_JS)), struck


@pytest.mark.parametrize("width", [1000, 1280, 1600])
def test_every_link_of_the_bar_is_to_be_seen(width: int, h200_page: Path, open_page: Opens) -> None:
    page = open_page(h200_page, viewport={"width": width, "height": 900})
    hidden = page.locator(".jumps a").evaluate_all("""links => links.filter((link) => {
      const { left, right, top, bottom } = link.getBoundingClientRect();
      return !link.contains(document.elementFromPoint((left + right) / 2, (top + bottom) / 2));
    }).map((link) => link.textContent)""")
    assert hidden == []


def test_ratios_are_seen_on_a_phone_before_anything_is_scrolled(h200_page: Path, open_page: Opens) -> None:
    page = open_page(h200_page, viewport=PHONE)
    seen = page.locator("#rows thead th").evaluate_all(
        "all => all.filter((th) => th.getBoundingClientRect().right <= innerWidth).map((th) => th.innerText.trim())"
    )
    assert seen[:4] == ["method", "time ×", "memory ×", "bytes ×"]


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_no_stretch_of_the_timeline_is_without_a_name(
    viewport: dict[str, int], h200_page: Path, open_page: Opens
) -> None:
    page = open_page(h200_page, viewport=viewport)
    chart, drawing = chart_at(page, "memory-timeline")
    texts = drawing.evaluate(TEXTS_JS)
    for panel in view_of(page, chart)["data"]["panels"]:
        first, last = panel["events"][0], sum(panel["events"])
        reached = first
        for name, start, end, _ in panel["phases"]:
            assert start <= reached, f"{panel['method']}: nothing is named from {reached} to {start}"
            assert name in texts
            reached = max(reached, end)
        assert reached >= last
    assert not (found := drawing.evaluate(COLLISIONS_JS)), found
    assert not (cut := drawing.evaluate(CUT_JS)), cut


def test_no_word_of_the_prose_is_cut(any_page: Path, read_page: Reads) -> None:
    page = read_page(any_page)
    for view in [view for chart in data_of(page)["charts"] for view in chart["views"]]:
        assert not re.search(r"\w…|…\w", view["says"]), view["says"]
    shown = page.locator("p, li").all_inner_texts()
    assert not [text for text in shown if re.search(r"\w…|…\w", text)]
