"""The page is read on phones, on paper, and where no script may run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.reading import COLLISIONS_JS, CUT_JS, colours_in, data_of, drawings_of, points_in

if TYPE_CHECKING:
    from playwright.sync_api import Page

    Reads = Callable[[Path], Page]
    Opens = Callable[..., Page]

# Pairs of blocks that stand one after the other and share pixels.
OVERLAPS_JS = """() => {
  const shown = (element) => element.getClientRects().length && getComputedStyle(element).position === "static";
  const parents = [document.body, ...document.querySelectorAll("header, main, section, figure, figcaption, .tools")];
  const found = [];
  for (const parent of parents) {
    const boxes = [...parent.children].filter(shown).map((element) => [element, element.getBoundingClientRect()]);
    for (const [index, [first, a]] of boxes.entries())
      for (const [second, b] of boxes.slice(index + 1)) {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && high > 1) found.push(`${first.outerHTML.slice(0, 60)} and ${second.outerHTML.slice(0, 60)}`);
      }
  }
  return found;
}"""

REDRAWN_JS = """() => [...document.querySelectorAll(".drawing:not([hidden])")]
  .every((drawing) => echarts.getInstanceByDom(drawing)?.getWidth() === drawing.clientWidth)"""

# Text that its own box hides; what scrolls is not hidden, and what ends in dots has its whole in a title.
HIDDEN_JS = """() => [...document.querySelectorAll("body *:not(script):not(style)")].filter((element) => {
  const style = getComputedStyle(element);
  if (style.textOverflow === "ellipsis" && element.title === element.textContent) return false;
  const clips = style.overflowX === "hidden" || style.overflowX === "clip";
  const visible = element.clientWidth > 1 && element.textContent.trim() && !element.closest("svg, .drawing");
  return visible && clips && element.scrollWidth > element.clientWidth + 1;
}).map((element) => element.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize(
    "made_of", ["h200_page", "broken_page", "hostile_page", "against_page", "hostile_against_page"]
)
def test_on_a_narrow_screen_nothing_is_cut_and_nothing_overlaps(
    made_of: str, request: pytest.FixtureRequest, open_page: Opens
) -> None:
    page = open_page(request.getfixturevalue(made_of), viewport={"width": 360, "height": 800})
    _fits(page, 360)
    page.set_viewport_size({"width": 768, "height": 800})  # turned, or a window that is made wider
    page.wait_for_function(REDRAWN_JS)
    _fits(page, 768)


def _fits(page: Page, width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not page.evaluate(OVERLAPS_JS)
    assert not page.evaluate(HIDDEN_JS)
    for chart, drawing in drawings_of(page):
        assert not (cut := drawing.evaluate(CUT_JS)), f"{width}, {chart['key']}: {cut}"
        assert not (found := drawing.evaluate(COLLISIONS_JS)), f"{width}, {chart['key']}: {found}"


def test_on_paper_the_page_is_light_has_its_charts_and_no_buttons(h200_page: Path, open_page: Opens) -> None:
    page = open_page(h200_page, color_scheme="dark")
    assert page.pdf().startswith(b"%PDF-")
    page.emulate_media(media="print")
    colours = colours_in(page.screenshot())
    assert min(max(colours, key=colours.__getitem__)) > 240, "paper is white"
    assert not [button for button in page.locator("button:not(th button)").all() if button.is_visible()]
    for chart, drawing in drawings_of(page):
        assert points_in(drawing), chart["key"]
        inks = drawing.evaluate(INKS_JS)
        light = [ink for ink in inks if _lightness(ink) > 0.6 and ink != ON_BARS]
        assert not light, f"{chart['key']}: light text on paper: {light}"


ON_BARS = "rgb(255, 255, 255)"
INKS_JS = "drawing => [...new Set([...drawing.querySelectorAll('svg text')].map((t) => getComputedStyle(t).fill))]"


def _lightness(colour: str) -> float:
    red, green, blue = (int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255


def test_without_scripts_the_figures_are_there_to_read(cpu_page: Path, read_page: Reads, open_page: Opens) -> None:
    with_scripts = data_of(read_page(cpu_page))
    page = open_page(cpu_page, java_script_enabled=False)
    for chart in with_scripts["charts"]:
        assert page.get_by_role("heading", name=chart["title"], exact=True).is_visible()
        assert page.get_by_text(chart["views"][0]["says"], exact=True).first.is_visible()
    rows = page.locator("table tbody tr")
    assert rows.count() == 6
    assert rows.first.is_visible()
