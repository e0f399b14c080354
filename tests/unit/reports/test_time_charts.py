"""Charts across sizes: every row is a point, or is said to be missing."""

from __future__ import annotations

import pytest

from dpscope.reports.looks import method_looks
from dpscope.reports.report import compare_results
from dpscope.reports.time_charts import scaling_over_batch, scaling_over_sequence, tradeoff

MIB = 2**20


@pytest.fixture
def rows(make_result):
    """Rows of (method, batch, sequence, median, peak in MiB); a status in place of the median for one that failed."""

    def make(*described):
        results = []
        for method, batch, length, median, peak in described:
            figures = {"status": median} if isinstance(median, str) else {"median": median, "peak": peak * MIB}
            results.append(make_result(method=method, batch_size=batch, seq_len=length, **figures))
        return compare_results(results)

    return make


def points(chart):
    """(method, size) -> the point drawn for it."""
    (view,) = chart.views
    return {(line["method"], point["short"]): point for line in view.data["lines"] for point in line["points"]}


TWO_SIZES = (
    ("standard", 2, 8, 10.0, 100),
    ("flat", 2, 8, 25.0, 300),
    ("standard", 4, 8, 20.0, 150),
    ("flat", 4, 8, 40.0, 600),
)


def test_a_method_is_a_point_a_size_at_its_multiples_of_standard(rows):
    chart = tradeoff(rows(*TWO_SIZES))
    found = points(chart)
    assert set(found) == {("flat", "2×8"), ("flat", "4×8")}
    assert (found["flat", "2×8"]["time_ratio"], found["flat", "2×8"]["memory_ratio"]) == (2.5, 3.0)
    (view,) = chart.views
    assert view.size == ""
    assert view.data["standard"]["method"] == "standard"
    assert "Over 2 sizes" in view.says
    assert "flat 2.00× to 2.50× the time and 3.00× to 4.00× the memory" in view.says


def test_points_of_a_line_go_from_the_smallest_size_to_the_largest(rows):
    (view,) = tradeoff(rows(*reversed(TWO_SIZES))).views
    (line,) = view.data["lines"]
    assert [point["short"] for point in line["points"]] == ["2×8", "4×8"]


def test_without_standard_time_and_memory_are_absolute(rows):
    (view,) = tradeoff(rows(("flat", 2, 8, 25.0, 300), ("ghost", 2, 8, 30.0, 200))).views
    assert not view.data["relative"]
    assert view.data["standard"] is None
    assert "flat 25.0 ms and 300.0 MiB" in view.says


def test_what_cannot_be_drawn_is_named_with_its_reason_and_stays_in_the_table(rows):
    found = rows(*TWO_SIZES, ("ghost", 4, 8, "oom", None), ("ghost", 8, 8, 30.0, 200))
    (view,) = tradeoff(found).views
    assert "ghost at batch 4, sequence 8 (oom)" in view.says
    assert "ghost at batch 8, sequence 8 (no standard at this size)" in view.says
    assert len(view.table.rows) == len(found)
    assert {len(line) for line in view.table.rows} == {len(view.table.columns)}


def test_one_row_is_no_tradeoff(rows):
    assert tradeoff(rows(("standard", 2, 8, 10.0, 100))) is None
    assert tradeoff([]) is None


def test_a_method_has_one_look_in_all_charts(rows):
    found = rows(*TWO_SIZES)
    looks = method_looks(["standard", "flat"])
    for chart in (tradeoff(found), scaling_over_batch(found)):
        (view,) = chart.views
        lines = view.data.get("lines") or view.data["panels"][0]["lines"]
        assert all(line["colour"] == looks[line["method"]]["colour"] for line in lines)


def test_growth_with_the_batch_has_a_panel_for_each_sequence_with_two_batches(rows):
    chart = scaling_over_batch(rows(*TWO_SIZES, ("standard", 2, 16, 30.0, 100)))
    (view,) = chart.views
    (panel,) = view.data["panels"]
    assert panel["title"] == "sequence 8"
    assert {line["method"]: [point["x"] for point in line["points"]] for line in panel["lines"]} == {
        "standard": [2, 4],
        "flat": [2, 4],
    }
    assert "From batch 2 to 4 at sequence 8" in view.says
    assert "flat 2.50× to 2.00×, 300.0 MiB to 600.0 MiB" in view.says


def test_without_two_sizes_there_is_no_growth(rows):
    found = rows(*TWO_SIZES)
    assert scaling_over_sequence(found) is None
    assert scaling_over_batch(found[:2]) is None


def test_a_size_that_ran_out_of_memory_is_drawn_as_such(rows):
    (view,) = scaling_over_batch(rows(*TWO_SIZES[:3], ("flat", 4, 8, "oom", None))).views
    (flat,) = (line for line in view.data["panels"][0]["lines"] if line["method"] == "flat")
    assert [(point["x"], point["status"], point["median_ms"]) for point in flat["points"]] == [
        (2, "ok", 25.0),
        (4, "oom", None),
    ]
    assert "Could not be measured: flat at batch 4, sequence 8 (oom)." in view.says


def test_where_standard_failed_times_are_absolute_rather_than_missing(rows):
    (view,) = scaling_over_batch(rows(*TWO_SIZES[:2], ("standard", 4, 8, "oom", None), TWO_SIZES[3])).views
    assert not view.data["relative"]
    assert "flat 25.0 ms to 40.0 ms" in view.says
