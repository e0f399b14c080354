"""Charts of traffic: bytes as counted, and estimates that nobody takes for measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpscope.reports.page.render import make_charts
from dpscope.reports.report import Report, compare_results
from dpscope.reports.traffic.figures import roofline, traffic
from tests.unit.reports.traffic_results import CEILINGS, kernel_rows, results_for, traffic_of


def rows(*methods, **options):
    return compare_results(results_for(*methods, **options))


def total(figures):
    return figures["dram_read_bytes"] + figures["dram_write_bytes"]


def sums(view, stack):
    """Bytes of each bar's segments."""
    parts = [part["bytes"] for part in view.data["parts"] if part["stack"] == stack]
    return [sum(count or 0 for count in counts) for counts in zip(*parts, strict=True)]


def test_a_bar_is_what_was_read_and_written_with_its_ratio():
    chart = traffic(rows("standard", "flat"))
    (view,) = chart.views
    assert sums(view, "direction") == [total(traffic_of(method)) for method in ("standard", "flat")]
    assert not sums(view, "family")
    assert [bar["ratio"] for bar in view.data["bars"]] == pytest.approx([1.0, 1.93], abs=0.01)
    assert "4.15 GB (1.93×) with flat" in view.says
    assert "≈" not in chart.title + chart.how + view.says


def test_a_setting_of_estimates_says_so_beside_one_that_was_measured():
    estimates = [replace(result, spec={**result.spec, "dtype": "fp32"}) for result in results_for(measured=False)]
    measured = [replace(result, spec={**result.spec, "dtype": "bf16"}) for result in results_for()]
    chart = next(chart for chart in make_charts(Report.of([*measured, *estimates]).settings) if chart.key == "traffic")
    assert [(view.setting, "estimate" in view.title, "not measured" in view.how) for view in chart.views] == [
        ("bf16", False, False),
        ("fp32", True, True),
    ]


def test_with_kernels_families_and_what_they_leave_over_make_up_the_same_bytes():
    (view,) = traffic(rows(per_kernel=True)).views
    assert sums(view, "family") == pytest.approx(sums(view, "direction"))
    labels = {part["label"]: part for part in view.data["parts"]}
    assert labels["clipping"]["private"]
    assert labels["not seen kernel by kernel"]["colour"] is None
    standard = {row["family"] for row in kernel_rows("standard")}
    assert "clipping" not in standard
    assert labels["clipping"]["bytes"][0] is None


def test_an_estimate_is_called_one_in_title_sentence_and_method():
    for chart in (traffic(rows(measured=False)), roofline(rows(measured=False))):
        (view,) = chart.views
        assert "≈ estimate" in chart.title
        assert "estimate" in chart.how
        assert "≈ estimate" in view.says
        drawn = view.data.get("bars") or [point for point in view.data["points"] if not point["kernel"]]
        assert all(each["estimated"] for each in drawn)
        assert any("estimate" in line for line in view.table.rows)


def test_an_estimate_among_measurements_is_marked_and_has_no_ratio_to_them():
    mixed = compare_results(results_for("standard") + results_for("ghost", measured=False))
    chart = traffic(mixed)
    (view,) = chart.views
    assert "partly ≈ estimate" in chart.title
    assert [(bar["estimated"], bar["ratio"]) for bar in view.data["bars"]] == [(False, 1.0), (True, None)]
    assert "2.15 GB with standard" in view.says
    assert "≈2.53 GB with ghost" in view.says


def test_every_size_is_a_view():
    several = compare_results([r for length in (256, 1024) for r in results_for("standard", "flat", seq_len=length)])
    for chart in (traffic(several), roofline(several)):
        assert [view.size for view in chart.views] == ["batch 4, sequence 256", "batch 4, sequence 1024"]


def test_a_step_stands_at_its_intensity_and_rate_below_the_measured_roofs():
    """Of the captured step: 108.6 GFLOP, 2.149 GB, 19 ms."""
    (view,) = roofline(rows("standard", "flat", per_kernel=True)).views
    point = view.data["points"][0]
    assert (point["x"], point["y"]) == pytest.approx((108_582_141_952 / 2_149_329_408, 108_582_141_952 / 0.019))
    assert not point["hollow"]
    assert view.data["roofs"] == {"bytes_per_second": 4.0e12, "levels": {"tensor cores": 6.24e14, "FP32": 5.0e13}}
    share = point["y"] / min(CEILINGS["dram_bytes_per_second"] * point["x"], CEILINGS["tensor_flops_per_second"])
    assert f"standard {share:.0%} (5.71 TFLOP/s at 50.5 FLOP a byte)" in view.says


def test_kernels_that_move_most_are_points_of_their_own():
    (view,) = roofline(rows("standard", per_kernel=True)).views
    kernels = [point for point in view.data["points"] if point["kernel"]]
    assert kernels
    assert all(point["method"] == "standard" and point["name"] != "standard" for point in kernels)
    assert not any(point["kernel"] for point in roofline(rows("standard")).views[0].data["points"])


def test_without_a_time_there_is_no_roofline_and_without_bytes_neither_chart(make_result):
    assert roofline(rows(timed=False)) is None
    assert traffic(rows(timed=False)) is not None
    assert traffic(compare_results([make_result()])) is None
