"""report.html is one file that opens at once, asks nobody for anything and shows every chart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .reading import colours_in, data_of, drawings_of, points_in, view_of

if TYPE_CHECKING:
    from playwright.sync_api import Page

MB = 10**6

LOAD_JS = """() => new Promise((drawn) => requestAnimationFrame(() => setTimeout(() => {
  const [load] = performance.getEntriesByType("navigation");
  const [paint] = performance.getEntriesByName("first-contentful-paint");
  drawn({ loaded: load.loadEventEnd, painted: paint?.startTime ?? 0 });
})))"""


@pytest.fixture(params=["cpu_page", "h200_page"])
def any_page(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_a_page_opens_offline_within_seconds_and_without_a_complaint(
    any_page: Path, open_page: Callable[..., Page], record_property: Callable[..., None]
) -> None:
    page = open_page(any_page)
    took = page.evaluate(LOAD_JS)
    record_property("milliseconds", took)
    print(
        f"\n{any_page.stat().st_size / MB:.2f} MB, loaded after {took['loaded']:.0f} ms, painted {took['painted']:.0f}"
    )
    # Under a second on an idle machine; tests run on busy ones.
    assert max(took.values()) < 3000
    assert page.locator("h1").count() == 1


def test_twelve_rows_with_every_instrument_fit_into_two_megabytes(cpu_page: Path) -> None:
    assert cpu_page.stat().st_size <= 2 * MB


def test_every_chart_is_drawn(any_page: Path, open_page: Callable[..., Page]) -> None:
    page = open_page(any_page)
    for chart, drawing in drawings_of(page):
        assert len(points_in(drawing)) >= 2, f"{chart['key']}: nothing is painted"
        colours = colours_in(drawing.screenshot())
        drawn = 1 - max(colours.values()) / sum(colours.values())
        assert drawn > 0.005, f"{chart['key']}: {drawn:.2%} of the picture differs from its background"
        assert len(colours) > 8, f"{chart['key']}: only {len(colours)} colours"


def test_no_text_of_a_drawing_is_outside_of_it(any_page: Path, open_page: Callable[..., Page]) -> None:
    page = open_page(any_page)
    for chart, drawing in drawings_of(page):
        assert not (cut := drawing.evaluate(CUT_JS)), f"{chart['key']}: {cut}"


def test_every_chart_says_something_with_a_number_and_how_it_was_measured(
    any_page: Path, open_page: Callable[..., Page]
) -> None:
    page = open_page(any_page)
    for chart in data_of(page)["charts"]:
        figure = page.locator(f"[id='{chart['key']}']")
        says = view_of(page, chart)["says"]
        assert figure.locator(".says").inner_text() == says
        assert any(character.isdigit() for character in says), f"{chart['key']}: {says}"
        assert figure.locator(".how").inner_text() == chart["how"]


CUT_JS = """drawing => {
  const outer = drawing.getBoundingClientRect();
  return [...drawing.querySelectorAll("svg text")].filter((text) => {
    const box = text.getBoundingClientRect();
    const beyond = [outer.left - box.left, box.right - outer.right, outer.top - box.top, box.bottom - outer.bottom];
    return box.width && Math.max(...beyond) > 1;
  }).map((text) => text.textContent);
}"""
