"""Numbers of traffic: checked against figures worked out by hand from the same results."""

from __future__ import annotations

import pytest

from dpscope.reports.outputs import write_reports
from dpscope.reports.report import Report, compare_results
from dpscope.reports.traffic import data
from dpscope.reports.traffic.data import by_size
from dpscope.results.schema import result_for
from tests.unit.reports.traffic_results import (
    CAPTURE,
    CEILINGS,
    ENVIRONMENT,
    SPEC,
    kernel_rows,
    results_for,
    traffic_of,
)


def by_method(results):
    return {traffic.method: traffic for group in by_size(compare_results(results)) for traffic in group}


def traffics(*methods, **options):
    return by_method(results_for(*methods, **options))


def total(figures):
    return figures["dram_read_bytes"] + figures["dram_write_bytes"]


def test_figures_of_the_captured_step():
    """1,135,307,776 bytes read, 1,014,021,632 written and 108,582,141,952 operations in 19 ms, for 4 × 256 tokens."""
    standard = traffics()["standard"]
    assert standard.dram_bytes == 2_149_329_408
    assert standard.bytes_per_item == 2_149_329_408 / 1024
    assert standard.items == (1024, "token")
    assert standard.intensity == pytest.approx(108_582_141_952 / 2_149_329_408)
    assert standard.bandwidth == pytest.approx(2_149_329_408 / 0.019)
    assert standard.bandwidth_fraction == pytest.approx(2_149_329_408 / 0.019 / 4.0e12)
    assert standard.flop_rate == pytest.approx(108_582_141_952 / 0.019)
    assert standard.ratio == 1.0


def test_the_ratio_is_of_dram_bytes():
    found = traffics()
    for method in ("flat", "ghost", "flash"):
        assert found[method].ratio == pytest.approx(total(traffic_of(method)) / total(traffic_of("standard")))


def test_operations_that_no_counter_saw_are_the_estimates_and_say_so():
    """FP32 units cannot be counted over a range: a float32 step has no tensor operations at all."""
    results = results_for("standard")
    results[1].ncu["flops"] = {"tensor": 0}
    results[1].ncu["estimate"]["flops"] = {"total": 10**11}
    (traffic,) = by_method(results).values()
    assert (traffic.flops, traffic.flops_estimated, traffic.estimated) == (10**11, True, False)
    assert not traffics("standard")["standard"].flops_estimated


def test_images_are_counted_by_sample():
    spec = {**SPEC, "seq_len": None, "method": "standard", "instrument": "ncu"}
    result = result_for(spec, ncu={"source": "measured", "traffic": CAPTURE["traffic"]}, environment=ENVIRONMENT)
    (traffic,) = by_method([result]).values()
    assert traffic.items == (4, "sample")


def test_a_measurement_is_never_compared_with_an_estimate():
    mixed = results_for("standard") + results_for("ghost", measured=False)
    found = by_method(mixed)
    assert found["ghost"].ratio is None
    assert found["ghost"].extra_bytes is None


def test_where_only_some_rows_have_kernels_the_estimates_of_all_explain_the_extra():
    mixed = results_for("standard", per_kernel=True) + results_for("flat")
    for result in mixed:
        if result.ncu:
            result.ncu["estimate"]["kernels"] = {"rows": kernel_rows(result.experiment), "note": ""}
    found = by_method(mixed)
    assert found["standard"].kernels.source == "measured"
    assert found["flat"].extra_bytes.kernels.source == "estimate"
    assert dict(found["flat"].extra_bytes.by_family)["clipping"] == 3 * 10**8


def test_what_is_not_known_is_none_and_not_zero():
    result = result_for({**SPEC, "method": "flat", "instrument": "ncu"}, ncu={"source": "measured", "traffic": {}})
    (traffic,) = by_method([result]).values()
    known = (traffic.dram_bytes, traffic.ratio, traffic.intensity, traffic.bandwidth, traffic.flops, traffic.kernels)
    assert known == (None,) * 6
    assert traffic.extra_seconds_at_peak is None


def test_a_row_without_a_time_has_bytes_and_no_bandwidth():
    traffic = traffics("standard", timed=False)["standard"]
    assert traffic.dram_bytes and traffic.bandwidth is None


def test_the_estimates_error_is_relative_to_the_measurement():
    standard = traffics()["standard"]
    assert standard.estimate_error("dram_read_bytes") == pytest.approx(-0.2)
    assert standard.estimate_error("dram_write_bytes") == pytest.approx(0.1)
    assert traffics(measured=False)["standard"].estimate_error("dram_read_bytes") is None


def test_the_extra_over_standard_adds_up_over_families():
    found = traffics(per_kernel=True)
    for method in ("flat", "ghost"):
        extra = dict(found[method].extra_bytes.by_family)
        assert sum(extra.values()) == sum(map(total, kernel_rows(method))) - sum(map(total, kernel_rows("standard")))
    assert dict(found["flat"].extra_bytes.by_family)["clipping"] == 3 * 10**8
    assert [count for _, count in found["flat"].extra_bytes.by_family] == sorted(
        (count for _, count in found["flat"].extra_bytes.by_family), reverse=True
    )
    assert found["standard"].extra_bytes.by_family == []


def test_a_family_nobody_knows_is_other():
    results = results_for("standard", per_kernel=True)
    results[1].ncu["kernels"]["rows"][0]["family"] = "a family of tomorrow"
    assert "other" in by_method(results)["standard"].kernels.bytes_by_family()


def test_measured_rows_without_kernels_fall_back_to_the_estimates_kernels():
    results = results_for("standard")
    assert by_method(results)["standard"].kernels is None
    results[1].ncu["estimate"]["kernels"] = {"rows": kernel_rows("standard")}
    assert by_method(results)["standard"].kernels.source == "estimate"


def test_extra_bytes_in_seconds_at_the_measured_bandwidth():
    flat = traffics()["flat"]
    extra = total(traffic_of("flat")) - total(traffic_of("standard"))
    assert flat.extra_seconds_at_peak == pytest.approx(extra / CEILINGS["dram_bytes_per_second"])
    assert flat.extra_seconds == pytest.approx(0.042 - 0.019)


def test_text_page_figures_and_tables_of_a_report_compute_a_rows_traffic_once(tmp_path, monkeypatch):
    made = []
    original = data.Traffic.__init__
    monkeypatch.setattr(
        data.Traffic, "__init__", lambda self, **figures: made.append(figures["row"]) or original(self, **figures)
    )
    report = Report.of([r for length in (256, 1024) for r in results_for(per_kernel=True, seq_len=length)])
    write_reports(report, tmp_path)
    assert len(made) == 8
    assert {path.name for path in tmp_path.iterdir()} >= {"summary.txt", "report.html", "traffic.csv", "roofline.png"}
