"""The table of all rows: what is shown, what sorts, what is missing and why."""

from __future__ import annotations

from dataclasses import replace

from dpscope.reports.page.table import NO_STANDARD, make_table
from dpscope.reports.report import Report

GIB = 2**30


def table_of(*results):
    return make_table(Report.of(results))


def cells_of(table, place):
    return dict(zip((name for name, _ in table.columns), table.lines[place][2], strict=True))


def test_a_cell_shows_a_rounded_figure_and_sorts_by_the_exact_one(make_result):
    cells = cells_of(table_of(make_result(median=10.0), make_result(method="flat", median=25.043)), 1)
    assert (cells["time a step"].text, cells["time a step"].value) == ("25.0 ms", 25.043)
    assert cells["time ×"].text == "2.50×"


def test_bars_are_shares_of_the_columns_largest_ratio(make_result):
    table = table_of(make_result(median=10.0), make_result(method="flat", median=40.0))
    assert [cells_of(table, place)["time ×"].share for place in (0, 1)] == [0.25, 1.0]


def test_a_failed_row_has_dashes_its_status_and_the_reason_everywhere(make_result):
    table = table_of(make_result(), make_result(method="flat", status="oom", reason="needs 9 GiB"))
    cells = cells_of(table, 1)
    assert {cells[name].text for name in ("time a step", "time ×", "peak memory", "memory ×")} == {"—"}
    assert cells["time ×"].why == "oom: needs 9 GiB"
    assert cells["time ×"].value == ""
    assert (cells["status"].text, table.lines[1][0].result.reason) == ("oom", "needs 9 GiB")


def test_a_ratio_without_standard_is_missing_with_the_reason(make_result):
    assert cells_of(table_of(make_result(method="flat")), 0)["time ×"].why == NO_STANDARD


def test_an_unsteady_ratio_is_marked(make_result):
    flat = make_result(method="flat", median=20.0)
    flat = replace(flat, timing={**flat.timing, "p10_ms": 10.0, "p90_ms": 90.0})
    assert cells_of(table_of(make_result(), flat), 1)["time ×"].text == "2.00×?"


def test_settings_get_a_column_only_where_they_differ(make_result):
    assert "dtype" not in dict(table_of(make_result()).columns)
    table = table_of(make_result(), make_result(dtype="bf16"))
    assert [cells_of(table, place)["dtype"].text for place in (0, 1)] == ["fp32", "bf16"]
    table = table_of(make_result(), make_result(steps=3))
    assert [cells_of(table, place)["steps"].text for place in (0, 1)] == ["1", "3"]


def test_csv_has_a_line_for_each_row_in_the_tables_order(make_result):
    table = table_of(make_result(peak=GIB), make_result(dtype="bf16"), make_result(method="flat", peak=3 * GIB))
    columns = table.csv["columns"]
    lines = [dict(zip(columns, row, strict=True)) for row in table.csv["rows"]]
    assert (
        [line["method"] for line in lines]
        == [row.method for row, _, _ in table.lines]
        == ["standard", "flat", "standard"]
    )
    assert lines[1]["peak_memory_bytes"] == 3 * GIB
