"""The page can be used from the keyboard and read by a screen reader, in both themes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .reading import data_of, drawings_of, figures_in, tooltip_of, view_of

if TYPE_CHECKING:
    from playwright.sync_api import Page

CONTROLS = "button, input, select, summary, a[href], [tabindex='0']"

# What has the focus: which control of the page it is, where, and whether one can see it.
FOCUS_JS = """controls => {
  const element = document.activeElement, box = element.getBoundingClientRect(), style = getComputedStyle(element);
  const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  return {
    index: [...document.querySelectorAll(controls)].indexOf(element),
    name: element.outerHTML.slice(0, 80),
    seen: element.matches(":focus-visible") && (outlined || style.boxShadow !== "none"),
  };
}"""

# Text whose contrast with what is behind it is below what WCAG asks for (AA: 4.5, large text 3). Drawings write in
# the same inks; what they write on a bar has the bar behind it, which no style tells.
FAINT_JS = """() => {
  const parse = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const v = c[i] / 255;
    return sum + weight * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  }, 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const ownText = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  return [...document.querySelectorAll("body *:not(script):not(style)")].flatMap((element) => {
    if (!ownText(element) || !element.getClientRects().length || element.closest(".drawing")) return [];
    const style = getComputedStyle(element), [a, b] = [light(parse(style.color)), light(behind(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    return contrast < (large ? 3 : 4.5) ? [`${contrast.toFixed(2)} ${element.textContent.slice(0, 50)}`] : [];
  });
}"""


def test_tab_visits_every_control_in_the_order_of_the_page(h200_page: Path, open_page: Callable[..., Page]) -> None:
    page = open_page(h200_page)
    visible = [number for number, each in enumerate(page.locator(CONTROLS).all()) if each.is_visible()]
    visited = []
    for _ in visible:
        page.keyboard.press("Tab")
        focus = page.evaluate(FOCUS_JS, CONTROLS)
        assert focus["index"] >= 0, f"not a control: {focus['name']}"
        assert focus["seen"], f"the focus is not to be seen on {focus['name']}"
        visited.append(focus["index"])
    assert visited == visible


def test_arrow_keys_read_a_drawing_out(h200_page: Path, open_page: Callable[..., Page]) -> None:
    page = open_page(h200_page)
    for chart, drawing in drawings_of(page):
        drawing.focus()
        told = []
        for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowRight", "ArrowDown"):
            page.keyboard.press(key)
            told.append(tooltip_of(drawing))
        assert all(told), f"{chart['key']}: a key that shows nothing: {told}"
        assert any(figures_in(text) for text in told), f"{chart['key']}: no figures in {told}"
        assert len(set(told)) > 1, f"{chart['key']}: every key shows {told[0]}"
        page.keyboard.press("Escape")


def test_enter_presses_a_button(cpu_page: Path, open_page: Callable[..., Page]) -> None:
    page = open_page(cpu_page)
    background = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(background)
    page.locator("#theme").focus()
    page.keyboard.press("Enter")
    assert page.evaluate(background) != before


def test_every_drawing_is_described_by_what_it_shows(cpu_page: Path, open_page: Callable[..., Page]) -> None:
    page = open_page(cpu_page)
    for chart, drawing in drawings_of(page):
        name = drawing.get_attribute("aria-label") or ""
        assert view_of(page, chart)["says"] in name, chart["key"]
        assert drawing.get_attribute("role") in ("img", "application"), "a name needs a role to be read out"


def test_every_control_has_a_name(cpu_page: Path, open_page: Callable[..., Page]) -> None:
    page = open_page(cpu_page)
    unnamed = page.evaluate("""() => [...document.querySelectorAll("button, input, select, a[href], summary")]
      .filter((control) => !(control.innerText?.trim() || control.ariaLabel || control.title || control.labels?.length))
      .map((control) => control.outerHTML)""")
    assert not unnamed
    for kind in ("csv", "png", "svg"):
        names = [
            each.get_attribute("aria-label") or each.inner_text() for each in page.locator(f"[data-save={kind}]").all()
        ]
        assert len(set(names)) == len(names) >= len(data_of(page)["charts"]), (
            f"a screen reader hears the same name twice: {names}"
        )


@pytest.mark.parametrize("made_of", ["cpu_page", "broken_page"])
def test_headings_are_in_order(made_of: str, request: pytest.FixtureRequest, open_page: Callable[..., Page]) -> None:
    page = open_page(request.getfixturevalue(made_of))
    levels = [
        int(name[1]) for name in page.locator("h1, h2, h3, h4").evaluate_all("all => all.map((h) => h.localName)")
    ]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels


def test_every_table_tells_its_columns(cpu_page: Path, open_page: Callable[..., Page]) -> None:
    page = open_page(cpu_page)
    tables = page.locator("table").all()
    assert tables
    for table in tables:
        assert table.locator("th[scope=col]").count() == table.locator("thead tr:last-child > *").count()
        assert (
            table.locator("caption").count()
            or table.get_attribute("aria-label")
            or table.get_attribute("aria-labelledby")
        )


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("made_of", ["h200_page", "broken_page"])
def test_text_stands_out_from_its_background(
    theme: str, made_of: str, request: pytest.FixtureRequest, open_page: Callable[..., Page]
) -> None:
    page = open_page(request.getfixturevalue(made_of), color_scheme=theme)
    for _ in drawings_of(page):
        pass  # every one is drawn
    assert not page.evaluate(FAINT_JS)
