"""What buttons save: the figures of a chart as CSV, its picture as SVG and PNG."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from tests.browser import sweeps
from tests.browser.reading import chart_at, colours_in, drawings_of, save, view_of

if TYPE_CHECKING:
    from playwright.sync_api import Page

    Reads = Callable[[Path], Page]

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("made_of", ["h200_page", "hostile_page", "against_page", "hostile_against_page"])
def test_csv_buttons_save_every_figure_of_a_chart(
    made_of: str, request: pytest.FixtureRequest, read_page: Reads
) -> None:
    page = read_page(request.getfixturevalue(made_of))
    for chart, _ in drawings_of(page):
        name, content = save(page, chart, "csv")
        assert name.startswith(chart["key"])
        assert name.endswith(".csv")
        columns, *rows = csv.reader(io.StringIO(content.decode(), newline=""))
        table = view_of(page, chart)["table"]
        assert columns == table["columns"]
        assert len(rows) == len(table["rows"]) > 0
        for saved, row in zip(rows, table["rows"], strict=True):
            assert [_plain(cell) for cell in saved] == [_plain(cell) for cell in row], chart["key"]
            assert not [cell for cell in saved if _runs(cell)], "a spreadsheet would run it"


def test_the_csv_of_step_times_is_what_was_measured(cpu_page: Path, measured: list[Any], read_page: Reads) -> None:
    page = read_page(cpu_page)
    chart, _ = chart_at(page, "step-time")
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(save(page, chart, "csv")[1].decode()))}
    timed = [result for result in sweeps.at(sweeps.FULL, measured) if result.instrument == "time"]
    assert len(rows) == len(timed) == 3
    for result in timed:
        for figure in ("median_ms", "p90_ms"):
            assert float(rows[result.experiment][figure]) == result.timing[figure]


def _plain(cell: object) -> object:
    """Numbers however they are written; texts without the mark that keeps spreadsheets from running them."""
    if cell is None:
        return ""
    try:
        return float(str(cell))
    except ValueError:
        text = str(cell)
        return text[1:] if text.startswith("'") and _runs(text[1:]) else text


def _runs(cell: str) -> bool:
    """Does a spreadsheet take it for a formula?"""
    try:
        float(cell)
    except ValueError:
        return cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    return False


@pytest.mark.parametrize("made_of", ["h200_page", "hostile_page"])
def test_svg_buttons_save_pictures_that_say_what_they_show(
    made_of: str, request: pytest.FixtureRequest, read_page: Reads
) -> None:
    page = read_page(request.getfixturevalue(made_of))
    for chart, _ in drawings_of(page):
        name, content = save(page, chart, "svg")
        assert name.startswith(chart["key"])
        assert name.endswith(".svg")
        root = ElementTree.fromstring(content)
        assert root.tag == f"{SVG}svg"
        told = "".join(root.itertext())
        assert chart["title"] in told
        assert view_of(page, chart)["size"] in told
        assert len(list(root.iter(f"{SVG}path"))) >= 2
        assert not [each for each in root.iter() if each.tag == f"{SVG}script" or "onerror" in each.attrib]


def test_png_buttons_save_pictures_sharp_enough_for_a_slide(h200_page: Path, read_page: Reads) -> None:
    from PIL import Image

    page = read_page(h200_page)
    for key in ("step-time", "memory-peak", "memory-timeline"):  # bars, hatched bars, and the heaviest
        chart, drawing = chart_at(page, key)
        name, content = save(page, chart, "png")
        assert name.endswith(".png")
        box = drawing.bounding_box()
        assert box is not None
        assert Image.open(io.BytesIO(content)).width >= 2 * box["width"], chart["key"]
        assert len(colours_in(content)) > 8, f"{chart['key']}: a blank picture"
