"""The page can be used from the keyboard and read by a screen reader, in both themes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.reading import (
    ALL_DRAWN_JS,
    CONTRAST_JS,
    TOOLTIP_JS,
    data_of,
    drawings_of,
    figures_in,
    tooltip_of,
    view_of,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

    Reads = Callable[[Path], Page]
    Opens = Callable[..., Page]

CONTROLS = "button, input, select, summary, a[href], [tabindex='0']"

# What has the focus: which control of the page it is, and whether one can see that.
FOCUS_JS = """controls => {
  const element = document.activeElement, style = getComputedStyle(element);
  const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  return {
    index: [...document.querySelectorAll(controls)].indexOf(element),
    name: element.outerHTML.slice(0, 80),
    seen: element.matches(":focus-visible") && (outlined || style.boxShadow !== "none"),
  };
}"""

# Text whose contrast with what is behind it is below what WCAG asks for (AA: 4.5, large text 3).
FAINT_JS = f"""() => {{
  {CONTRAST_JS}
  const ownText = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  return [...document.querySelectorAll("body *:not(script):not(style)")].flatMap((element) => {{
    if (!ownText(element) || !element.getClientRects().length || element.closest(".drawing, :disabled")) return [];
    const style = getComputedStyle(element), found = contrast(parse(style.color), behind(element));
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    return found < (large ? 3 : 4.5) ? [`${{found.toFixed(2)}} ${{element.textContent.slice(0, 50)}}`] : [];
  }});
}}"""

# The same of a drawing's text, on the page or on the shape that was painted under its middle.
FAINT_IN_DRAWING_JS = f"""drawing => {{
  {CONTRAST_JS}
  const paper = behind(drawing), painted = [];
  const holds = ({{ shape }}, x, y) => {{
    const {{ a, b, c, d, e, f }} = shape.getScreenCTM(), screen = new DOMMatrix([a, b, c, d, e, f]);
    return a * d !== b * c && shape.isPointInFill(new DOMPoint(x, y).matrixTransform(screen.inverse()));
  }};
  return [...drawing.querySelectorAll("svg path, svg rect, svg circle, svg text")].flatMap((shape) => {{
    const style = getComputedStyle(shape), fill = parse(style.fill);
    const solid = style.fill.startsWith("rgb(") && style.fillOpacity * style.opacity === 1;
    if (shape.localName !== "text") {{
      if (solid && !shape.closest("defs")) painted.push({{ shape, fill }});
      return [];
    }}
    const {{ x, y, width, height }} = shape.getBoundingClientRect();
    const under = painted.findLast((each) => holds(each, x + width / 2, y + height / 2));
    const ground = under?.fill ?? paper, opacity = style.fillOpacity * style.opacity;
    const found = contrast(fill.map((part, i) => opacity * part + (1 - opacity) * ground[i]), ground);
    const where = under ? "on a shape" : "on the page";
    return width && found < 4.5 ? [`${{found.toFixed(2)}} ${{shape.textContent}} ${{where}}`] : [];
  }});
}}"""


def test_tab_visits_every_control_in_the_order_of_the_page(h200_page: Path, read_page: Reads) -> None:
    page = read_page(h200_page)
    visible = page.locator(CONTROLS).evaluate_all(
        "all => all.flatMap((each, number) => each.checkVisibility() ? [number] : [])"
    )
    visited = []
    for _ in visible:
        page.keyboard.press("Tab")
        focus = page.evaluate(FOCUS_JS, CONTROLS)
        assert focus["index"] >= 0, f"not a control: {focus['name']}"
        assert focus["seen"], f"the focus is not to be seen on {focus['name']}"
        visited.append(focus["index"])
    assert visited == visible


def test_arrow_keys_read_a_drawing_out(h200_page: Path, read_page: Reads) -> None:
    page = read_page(h200_page)
    for chart, drawing in drawings_of(page):
        drawing.focus()
        told = []
        for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowRight", "ArrowDown"):
            page.keyboard.press(key)
            told.append(tooltip_of(drawing))
        assert all(told), f"{chart['key']}: a key that shows nothing: {told}"
        assert any(figures_in(text) for text in told), f"{chart['key']}: no figures in {told}"
        assert len(set(told)) > 1, f"{chart['key']}: every key shows {told[0]}"
        heard = page.locator("#live[aria-live]").inner_text()
        assert heard.split() == told[-1].split(), "a screen reader is told what is shown"
        page.keyboard.press("Escape")
        page.wait_for_function(f"drawing => !({TOOLTIP_JS})(drawing)", arg=drawing.element_handle())


def test_every_drawing_is_described_by_what_it_shows(any_page: Path, read_page: Reads) -> None:
    page = read_page(any_page)
    for chart, drawing in drawings_of(page):
        assert drawing.get_attribute("aria-label") == view_of(page, chart)["says"], chart["key"]
        assert drawing.get_attribute("role") == "application", "its arrow keys are its own"


def test_every_control_has_a_name_of_its_own(any_page: Path, read_page: Reads) -> None:
    page = read_page(any_page)
    unnamed = page.evaluate("""() => [...document.querySelectorAll("button, input, select, a[href], summary")]
      .filter((control) => !(control.innerText?.trim() || control.ariaLabel || control.title || control.labels?.length))
      .filter((control) => control.checkVisibility()).map((control) => control.outerHTML)""")
    assert not unnamed
    for kind in ("csv", "png", "svg"):
        names = page.locator(f"[data-save={kind}]").evaluate_all(
            "all => all.map((each) => each.ariaLabel || each.innerText)"
        )
        assert len(set(names)) == len(names) >= len(data_of(page)["charts"]), f"the same name twice: {names}"


@pytest.mark.parametrize("made_of", ["h200_page", "broken_page", "against_page"])
def test_headings_are_in_order_and_tables_tell_their_columns(
    made_of: str, request: pytest.FixtureRequest, read_page: Reads
) -> None:
    page = read_page(request.getfixturevalue(made_of))
    names = page.locator("h1, h2, h3, h4").evaluate_all("all => all.map((heading) => heading.localName)")
    levels = [int(name[1]) for name in names]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels
    tables = page.locator("table:not(.drawing *)").all()
    assert tables
    for table in tables:
        assert table.locator("thead th[scope=col]").count() == table.locator("tbody tr").first.locator("> *").count()
        assert table.evaluate("table => table.caption ?? table.ariaLabel ?? table.closest('[role=region][aria-label]')")


def test_the_data_of_a_chart_can_be_read_as_a_table(cpu_page: Path, open_page: Opens) -> None:
    page = open_page(cpu_page)
    figure = page.locator("#step-time")
    figure.locator("summary").press("Enter")
    wanted = next(chart for chart in data_of(page)["charts"] if chart["key"] == "step-time")
    table = view_of(page, wanted)["table"]
    assert figure.locator("th[scope=col]").all_inner_texts() == table["columns"]
    shown = [row.locator("td").all_inner_texts() for row in figure.locator("tbody tr").all()]
    assert [row[0] for row in shown] == [row[0] for row in table["rows"]]
    page.locator("#size").select_option(label="batch 4, sequence 16")
    assert [row.locator("td").all_inner_texts() for row in figure.locator("tbody tr").all()] != shown


@pytest.mark.parametrize("made_of", ["h200_page", "broken_page", "against_page"])
def test_text_stands_out_from_what_is_behind_it_in_both_themes(
    made_of: str, request: pytest.FixtureRequest, open_page: Opens
) -> None:
    page = open_page(request.getfixturevalue(made_of), color_scheme="dark")
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        page.wait_for_function(ALL_DRAWN_JS)
        assert not page.evaluate(FAINT_JS), theme
        for chart, drawing in drawings_of(page):
            assert not (faint := drawing.evaluate(FAINT_IN_DRAWING_JS)), f"{theme}, {chart['key']}: {faint}"
