"""What a test reads off an open page: its data, its drawings, their tooltips, and what buttons download."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

# Unit -> how many of the data's own unit (bytes, ms, or a bare number) one of it is.
UNITS = {
    **{"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12},
    **{"µs": 1e-3, "ms": 1, "s": 1e3, "×": 1, "": 1},
}
FIGURE = re.compile(r"(\d+(?:\.(\d+))?) ?(KiB|MiB|GiB|kB|MB|GB|TB|B|µs|ms|s|×|)(?![\w/])")

# Points inside what is painted in a drawing, the largest shapes first, in the window's coordinates.
POINTS_JS = """drawing => {
  const places = [[0.5, 0.5], [0.5, 0.1], [0.2, 0.5]];
  const outer = drawing.getBoundingClientRect();
  const shapes = [...drawing.querySelectorAll("svg path, svg rect, svg circle")].filter((shape) => {
    const fill = getComputedStyle(shape).fill, box = shape.getBoundingClientRect();
    const whole = box.width > 0.95 * outer.width && box.height > 0.95 * outer.height;
    return fill !== "none" && fill !== "transparent" && !whole && box.width > 1 && box.height > 1;
  });
  return shapes.map((shape) => shape.getBoundingClientRect())
    .sort((a, b) => b.width * b.height - a.width * a.height)
    .flatMap(({ x, y, width, height }) => places.map(([right, down]) => [x + right * width, y + down * height]));
}"""

# ECharts's tooltip floats above everything else in the drawing, or is there unseen.
TOOLTIP_JS = """drawing => {
  const floating = [...drawing.querySelectorAll("div")].filter((box) => box.style.zIndex > 1000);
  const seen = (box) => box.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  return floating.find(seen)?.innerText.trim() ?? "";
}"""


ALL_DRAWN_JS = "() => !document.querySelector(\".drawing[aria-busy='true']:not([hidden])\")"

# What a reader can change.
STATE_JS = """() => ({
  theme: document.documentElement.dataset.theme,
  chosen: [...document.querySelectorAll("select, input")].map((control) => control.value),
  open: [...document.querySelectorAll("details")].map((details) => details.open),
  order: [...document.querySelectorAll("#rows tbody tr")].map((row) => row.dataset.row).join(),
  zoomed: [...document.querySelectorAll(".drawing")].map((drawing) => {
    const [zoom] = echarts.getInstanceByDom(drawing)?.getOption().dataZoom ?? [];
    return zoom && [zoom.start, zoom.end];
  }),
})"""

# Texts of a drawing that go beyond it.
CUT_JS = """drawing => {
  const outer = drawing.getBoundingClientRect();
  return [...drawing.querySelectorAll("svg text")].filter((text) => {
    const box = text.getBoundingClientRect();
    const beyond = [outer.left - box.left, box.right - outer.right, outer.top - box.top, box.bottom - outer.bottom];
    return box.width && Math.max(...beyond) > 1;
  }).map((text) => text.textContent);
}"""

# Labels of one drawing that are printed over each other.
COLLISIONS_JS = """drawing => {
  const labels = [...drawing.querySelectorAll("svg text")].filter((text) => text.textContent.trim())
    .map((text) => [text.textContent, text.getBoundingClientRect()]);
  const found = [];
  for (const [index, [first, a]] of labels.entries())
    for (const [second, b] of labels.slice(index + 1)) {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 3 && high > 4) found.push(`${first} / ${second}`);
    }
  return found;
}"""

CONTRAST_JS = """
  const parse = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const v = c[i] / 255;
    return sum + weight * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  }, 0);
  const contrast = (one, other) => {
    const [a, b] = [light(one), light(other)];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
"""


_data: WeakKeyDictionary[Page, dict[str, Any]] = WeakKeyDictionary()


def data_of(page: Page) -> dict[str, Any]:
    """What the page draws from. Read once: nothing changes it."""
    if page not in _data:
        _data[page] = json.loads(page.locator("#data").text_content() or "")
    return _data[page]


def drawings_of(page: Page, key: str | None = None) -> Iterator[tuple[dict[str, Any], Locator]]:
    """The data and the drawing of every chart at the chosen size (or of one), in the middle of the window and drawn."""
    charts = [chart for chart in data_of(page)["charts"] if key in (None, chart["key"])]
    assert charts
    page.wait_for_function(ALL_DRAWN_JS)
    for chart in charts:
        drawing = page.locator(f"[id='{chart['key']}'] .drawing")
        if drawing.is_visible():
            drawing.evaluate("drawing => drawing.scrollIntoView({ block: 'center', behavior: 'instant' })")
            yield chart, drawing


def points_in(drawing: Locator) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = drawing.evaluate(POINTS_JS)
    return points


def tooltip_of(drawing: Locator) -> str:
    text: str = drawing.evaluate(TOOLTIP_JS)
    return text


def hover(page: Page, drawing: Locator, tries: int = 40) -> str:
    """The first tooltip with a figure that painted shapes of a drawing give."""
    text = ""
    for x, y in points_in(drawing)[:tries]:
        page.mouse.move(x, y)
        if figures_in(text := tooltip_of(drawing) or text):
            break
    return text


def tooltips(page: Page, drawing: Locator, tries: int = 24) -> list[str]:
    """What the largest painted shapes of a drawing tell."""
    told = []
    for x, y in points_in(drawing)[:tries]:
        page.mouse.move(x, y)
        told.append(tooltip_of(drawing))
    return told


def figures_in(text: str) -> list[tuple[float, float, str]]:
    """(value, how far rounding may have moved it, unit as written) of every number in a text."""
    found = []
    for match in FIGURE.finditer(text.replace("\u202f", "").replace(",", "")):
        number, decimals, unit = match[1], len(match[2] or ""), match[3]
        found.append((float(number) * UNITS[unit], 0.501 * 10**-decimals * UNITS[unit], unit))
    return found


def numbers_in(value: Any) -> Iterator[float]:
    """Every number of a chart's data."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from numbers_in(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def colours_in(image: bytes) -> dict[tuple[int, ...], int]:
    """Colour -> pixels of a PNG."""
    from PIL import Image

    picture = Image.open(io.BytesIO(image)).convert("RGB")
    return {colour: count for count, colour in picture.getcolors(maxcolors=picture.width * picture.height)}


_saved: WeakKeyDictionary[Page, int] = WeakKeyDictionary()
MOST_DOWNLOADS = 10  # that Chromium gives one page before it asks the reader, and here there is none


def save(page: Page, chart: dict[str, Any], kind: str) -> tuple[str, bytes]:
    """The name and content of what a chart's button downloads."""
    _saved[page] = _saved.get(page, 0) + 1
    if _saved[page] % MOST_DOWNLOADS == 0:
        page.reload()
        page.wait_for_function(ALL_DRAWN_JS)
    with page.expect_download(timeout=15_000) as download:
        page.locator(f"[id='{chart['key']}'] [data-save={kind}]").click()
    path = download.value.path()
    return download.value.suggested_filename, Path(path).read_bytes()


def chart_at(page: Page, key: str) -> tuple[dict[str, Any], Locator]:
    """One chart's data and its drawing."""
    return next((chart, drawing) for chart, drawing in drawings_of(page, key))


def view_of(page: Page, chart: dict[str, Any]) -> dict[str, Any]:
    """What a chart has to show at the size that is chosen on the page."""
    sizes = data_of(page)["sizes"]
    chooser = page.locator("#size")
    chosen = sizes[int(chooser.input_value()) if chooser.count() else 0]
    view: dict[str, Any] = next(
        view
        for view in chart["views"]
        if view["size"] in ("", chosen["size"]) and view["setting"] in ("", chosen["setting"])
    )
    return view
