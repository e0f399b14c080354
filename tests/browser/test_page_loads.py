"""report.html is one file that opens at once, asks nobody for anything and shows every chart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser import sweeps
from tests.browser.reading import (
    ALL_DRAWN_JS,
    COLLISIONS_JS,
    CUT_JS,
    colours_in,
    data_of,
    drawings_of,
    points_in,
    view_of,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    Reads = Callable[[Path], Page]
    Opens = Callable[..., Page]

# Where everything stands that a link leads to, in the page.
PLACES_JS = """() => Object.fromEntries([...document.querySelectorAll(".jumps a")].map(({ hash }) =>
  [hash, Math.round(document.querySelector(hash).getBoundingClientRect().top + scrollY)]))"""

# How far below the bar the target of a link is, and how far the page could still be scrolled.
LANDED_JS = """hash => ({
  gap: document.querySelector(hash).getBoundingClientRect().top
    - document.querySelector(".bar").getBoundingClientRect().bottom,
  left: document.documentElement.scrollHeight - innerHeight - scrollY,
})"""


def test_a_page_opens_offline_without_a_complaint_and_shows_its_headline(any_page: Path, read_page: Reads) -> None:
    page = read_page(any_page)  # which looks for complaints
    assert page.locator("h1").count() == 1
    assert page.locator(".lead:visible").count() == 1


def test_a_page_with_every_chart_opens_within_a_second_of_work(h200_page: Path, browser: Browser) -> None:
    page = browser.new_context(offline=True).new_page()
    devtools = page.context.new_cdp_session(page)
    # The processor's time and not the clock's: tests run on busy machines.
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(h200_page.as_uri())
    worked = {each["name"]: each["value"] for each in devtools.send("Performance.getMetrics")["metrics"]}
    page.context.close()
    print(f"\n{h200_page.stat().st_size / 1e6:.2f} MB, {worked['TaskDuration']:.2f} s of work")
    assert worked["TaskDuration"] < 1


def test_twelve_rows_with_every_instrument_fit_into_two_megabytes(page_from: Callable[..., Path]) -> None:
    twelve = sweeps.multiply(sweeps.read_h200(), (8, 16, 32), size=(8, 1024))
    assert len({(result.experiment, result.spec["batch_size"]) for result in twelve}) == 12
    assert page_from(twelve).stat().st_size <= 2_000_000


def test_every_chart_is_drawn_with_all_its_text_inside(any_page: Path, read_page: Reads) -> None:
    page = read_page(any_page)
    drawn = []
    for chart, drawing in drawings_of(page):
        drawn.append(chart["key"])
        assert len(points_in(drawing)) >= 2, f"{chart['key']}: nothing is painted"
        colours = colours_in(drawing.screenshot())
        share = 1 - max(colours.values()) / sum(colours.values())
        assert share > 0.005, f"{chart['key']}: {share:.2%} of the picture differs from its background"
        assert len(colours) > 8, f"{chart['key']}: only {len(colours)} colours"
        assert not (cut := drawing.evaluate(CUT_JS)), f"{chart['key']}: {cut}"
        assert not (found := drawing.evaluate(COLLISIONS_JS)), f"{chart['key']}: {found}"
    assert drawn == [chart["key"] for chart in data_of(page)["charts"]], "first comes the size that most is known of"


def test_real_sweeps_give_every_kind_of_chart(
    cpu_page: Path, h200_page: Path, against_page: Path, read_page: Reads
) -> None:
    """So that what is tested on these pages is tested of every drawing."""
    pages = [data_of(read_page(path)) for path in (cpu_page, h200_page, against_page)]
    kinds = read_page(h200_page).evaluate("Object.keys(drawings)")
    assert {chart["kind"] for data in pages for chart in data["charts"]} == set(kinds)


def test_every_chart_says_something_with_a_number_and_how_it_was_measured(any_page: Path, read_page: Reads) -> None:
    page = read_page(any_page)
    charts = data_of(page)["charts"]
    said, how = (page.locator(f"figure.chart {part}").all_inner_texts() for part in (".says", ".how"))
    assert said == [view_of(page, chart)["says"] for chart in charts]
    assert how == [chart["how"] for chart in charts]
    assert all("not see" in sentence for sentence in how), how
    assert all(any(map(str.isdigit, sentence)) for sentence in said), said


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_moves_while_charts_are_drawn(width: int, h200_page: Path, browser: Browser) -> None:
    context = browser.new_context(offline=True, viewport={"width": width, "height": 800})
    page = context.new_page()
    page.add_init_script("window.requestIdleCallback = (work) => { window.waiting = work; }")  # far charts wait
    page.goto(h200_page.as_uri())
    before = page.evaluate(PLACES_JS)
    assert not page.evaluate(ALL_DRAWN_JS)
    page.evaluate("() => { while (window.waiting) { const work = window.waiting; window.waiting = null; work(); } }")
    assert page.evaluate(ALL_DRAWN_JS)
    assert page.evaluate(PLACES_JS) == before
    context.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_a_link_puts_what_it_names_under_the_bar_at_once_and_for_good(
    width: int, h200_page: Path, open_page: Opens
) -> None:
    page = open_page(h200_page, viewport={"width": width, "height": 800})
    links = page.locator(".jumps a")
    for link in reversed(links.all()):
        target = link.get_attribute("href")
        link.click()
        page.wait_for_function(ALL_DRAWN_JS)
        landed = page.evaluate(LANDED_JS, target)
        assert landed["gap"] > -1, f"{target} is behind the bar"
        assert landed["gap"] < 40 or landed["left"] < 2, f"{target} is {landed['gap']} pixels further down"


def test_a_drawing_that_fails_leaves_the_others_and_says_so(
    cpu_page: Path, open_page: Opens, complaints: list[str]
) -> None:
    page = open_page(cpu_page)
    page.evaluate("() => { drawings['step-time'] = () => { throw new Error('no ink'); }; }")
    page.locator("#theme").click()
    page.wait_for_function(ALL_DRAWN_JS)
    assert "could not be drawn: no ink" in page.locator("#step-time .says").inner_text()
    assert len(complaints) == 1
    complaints.clear()
    assert points_in(page.locator("#memory-peak .drawing"))
