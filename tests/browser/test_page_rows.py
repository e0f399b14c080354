"""The table of all rows: filtered, sorted and saved, with two hundred rows as with six."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.browser.reading import CUT_JS, data_of, drawings_of, points_in
from tests.browser.sweeps import BATCHES, METHODS

if TYPE_CHECKING:
    from playwright.sync_api import Page

    Reads = Callable[[Path], Page]
    Opens = Callable[..., Page]

# What one sees of the table: the texts of the cells of every row that is shown.
ROWS_JS = """() => [...document.querySelectorAll("#rows tbody tr")].filter((row) => row.getClientRects().length)
  .map((row) => [...row.cells].map((cell) => cell.innerText.trim()))"""

# Milliseconds from a choice in the filter until the table is laid out again.
FILTER_JS = """word => {
  const filter = document.querySelector("#rows-section input[data-filter]"), start = performance.now();
  filter.value = word;
  filter.dispatchEvent(new Event("input", { bubbles: true }));
  document.querySelector("#rows").getBoundingClientRect();
  return performance.now() - start;
}"""


def rows_of(page: Page) -> list[dict[str, str]]:
    columns = [cell.inner_text().strip(" ↑↓") for cell in page.locator("#rows thead th").all()]
    return [dict(zip(columns, cells, strict=True)) for cells in page.evaluate(ROWS_JS)]


def test_the_table_has_a_row_for_every_method_at_every_size(
    cpu_page: Path, measured: list[Any], read_page: Reads
) -> None:
    rows = rows_of(read_page(cpu_page))
    timed = [result for result in measured if result.instrument == "time"]
    assert len(rows) == len(timed) == 6
    for result in timed:
        batch, length = result.spec["batch_size"], result.spec["seq_len"]
        wanted = (result.experiment, str(batch), str(length))
        row = next(row for row in rows if (row["method"], row["batch"], row["sequence"]) == wanted)
        assert row["time a step"].removesuffix("?") == f"{result.timing['median_ms']:.1f} ms"
        assert row["status"] == "ok"


def test_typing_leaves_the_rows_that_have_the_words(cpu_page: Path, open_page: Opens) -> None:
    page = open_page(cpu_page)
    page.locator("#filter").press_sequentially("flash")
    assert [row["method"] for row in rows_of(page)] == ["flash"] * 2
    assert page.locator("#rows-count").inner_text() == "2 of 6 rows"
    page.locator("#filter").fill("no such row")
    assert rows_of(page) == []
    page.locator("#filter").fill("")
    assert len(rows_of(page)) == 6


def test_choosing_a_method_and_a_size_leaves_one_row(cpu_page: Path, open_page: Opens) -> None:
    page = open_page(cpu_page)
    page.locator("[data-filter=method]").select_option("flash")
    assert {row["method"] for row in rows_of(page)} == {"flash"}
    page.locator("[data-filter=size]").select_option("batch 4, sequence 16")
    assert [(row["method"], row["batch"]) for row in rows_of(page)] == [("flash", "4")]


def test_a_press_on_a_heading_sorts_and_a_second_turns_it_round(cpu_page: Path, open_page: Opens) -> None:
    page = open_page(cpu_page)
    for column in ("method", "batch", "time a step", "memory ×"):
        heading = page.locator("#rows thead th").filter(has_text=column).first
        for order in ("ascending", "descending"):
            heading.get_by_role("button").click()
            assert heading.get_attribute("aria-sort") == order
            texts = [row[column] for row in rows_of(page)]
            shown = texts if column == "method" else [_number(text) for text in texts]
            assert shown == sorted(shown, reverse=order == "descending"), column
            assert len(set(shown)) > 1


def _number(text: str) -> float:
    """62.2 ms, 1.93×?, 0.1 MiB, 91.8 KiB: bytes are compared as bytes."""
    number, _, unit = text.rstrip("×?").partition(" ")
    return float(number) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "s": 1e3}.get(unit, 1)


def test_the_csv_has_the_rows_that_are_shown(cpu_page: Path, measured: list[Any], open_page: Opens) -> None:
    page = open_page(cpu_page)
    page.locator("[data-filter=method]").select_option("flat")
    with page.expect_download() as download:
        page.locator("#rows-section [data-save=csv]").click()
    saved = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8-sig"))))
    medians = [r.timing["median_ms"] for r in measured if r.instrument == "time" and r.experiment == "flat"]
    assert [row["method"] for row in saved] == ["flat"] * 2
    assert sorted(float(row["time_median_ms"]) for row in saved) == sorted(medians)


def test_two_hundred_rows_are_all_there_and_stay_usable(large_page: Path, read_page: Reads) -> None:
    page = read_page(large_page)
    waited = min(
        page.evaluate(FILTER_JS, word) for word in ("flat", "ok", "nothing", "flash")
    )  # the others were kept waiting
    print(f"\n{large_page.stat().st_size / 1e6:.2f} MB, filtered in {waited:.0f} ms")
    assert len(rows_of(page)) == len(BATCHES)
    assert waited < 100
    page.evaluate(FILTER_JS, "")
    rows = rows_of(page)
    assert len(rows) == 201
    assert {(row["method"], row["batch"]) for row in rows} == {(m, str(batch)) for m in METHODS for batch in BATCHES}


def test_the_last_of_two_hundred_rows_can_be_scrolled_to(large_page: Path, read_page: Reads) -> None:
    page = read_page(large_page)
    last = page.locator("#rows tbody tr").last
    last.scroll_into_view_if_needed()
    assert last.evaluate("""row => {
      const { left, top, height } = row.getBoundingClientRect();
      return row.contains(document.elementFromPoint(left + 5, top + height / 2));
    }"""), "something covers it"
    box, heading = (page.locator(name).first.bounding_box() for name in ("#rows-section .scroll", "#rows thead th"))
    assert box is not None
    assert heading is not None
    assert abs(heading["y"] - box["y"]) < 2, "the headings stay at the top of the table's box"


def test_with_many_sizes_every_chart_is_drawn_and_its_labels_are_inside(large_page: Path, read_page: Reads) -> None:
    page = read_page(large_page)
    assert len(data_of(page)["sizes"]) == len(BATCHES)
    for chart, drawing in drawings_of(page):
        assert points_in(drawing), chart["key"]
        assert not (cut := drawing.evaluate(CUT_JS)), f"{chart['key']}: {cut}"
