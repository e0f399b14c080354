"""Numbers of traffic: checked against figures worked out by hand from the same results."""

from __future__ import annotations

import csv

import pytest

from dpscope.reports.tables import compare_results
from dpscope.reports.traffic.csv import TRAFFIC_CSV
from dpscope.reports.traffic.data import compare_traffic
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
from tests.unit.reports.writing import write


def traffics(*methods, **options):
    found = compare_traffic(compare_results(results_for(*methods, **options)))
    return {traffic.row.method: traffic for traffic in found}


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
    (traffic,) = compare_traffic(compare_results(results))
    assert (traffic.flops, traffic.flops_estimated, traffic.estimated) == (10**11, True, False)
    assert not traffics("standard")["standard"].flops_estimated


def test_images_are_counted_by_sample():
    spec = {**SPEC, "seq_len": None, "method": "standard", "instrument": "ncu"}
    result = result_for(spec, ncu={"source": "measured", "traffic": CAPTURE["traffic"]}, environment=ENVIRONMENT)
    (traffic,) = compare_traffic(compare_results([result]))
    assert traffic.items == (4, "sample")


def test_a_measurement_is_never_compared_with_an_estimate():
    mixed = results_for("standard") + results_for("ghost", measured=False)
    found = {traffic.row.method: traffic for traffic in compare_traffic(compare_results(mixed))}
    assert found["ghost"].ratio is None
    assert found["ghost"].explanation is None


def test_where_only_some_rows_have_kernels_the_estimates_of_all_explain_the_extra():
    mixed = results_for("standard", per_kernel=True) + results_for("flat")
    for result in mixed:
        if result.ncu:
            result.ncu["estimate"]["kernels"] = {"rows": kernel_rows(result.experiment), "note": ""}
    found = {traffic.row.method: traffic for traffic in compare_traffic(compare_results(mixed))}
    assert found["standard"].kernels.source == "measured"
    assert found["flat"].explanation.kernels.source == "estimate"
    assert dict(found["flat"].explanation.extra)["clipping"] == 3 * 10**8


def test_what_is_not_known_is_none_and_not_zero():
    result = result_for({**SPEC, "method": "flat", "instrument": "ncu"}, ncu={"source": "measured", "traffic": {}})
    (traffic,) = compare_traffic(compare_results([result]))
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
        extra = dict(found[method].explanation.extra)
        assert sum(extra.values()) == sum(map(total, kernel_rows(method))) - sum(map(total, kernel_rows("standard")))
    assert dict(found["flat"].explanation.extra)["clipping"] == 3 * 10**8
    assert [count for _, count in found["flat"].explanation.extra] == sorted(
        (count for _, count in found["flat"].explanation.extra), reverse=True
    )
    assert found["standard"].explanation.extra == []


def test_a_family_nobody_knows_is_other():
    traffic = traffics("standard", per_kernel=True)["standard"]
    traffic.data["kernels"]["rows"][0]["family"] = "a family of tomorrow"
    assert "other" in traffic.kernels.bytes_by_family()


def test_measured_rows_without_kernels_fall_back_to_the_estimates_kernels():
    traffic = traffics("standard")["standard"]
    assert traffic.kernels is None
    traffic.data["estimate"]["kernels"] = {"rows": kernel_rows("standard")}
    assert traffic.kernels.source == "estimate"


def test_extra_bytes_in_seconds_at_the_measured_bandwidth():
    flat = traffics()["flat"]
    extra = total(traffic_of("flat")) - total(traffic_of("standard"))
    assert flat.extra_seconds_at_peak == pytest.approx(extra / CEILINGS["dram_bytes_per_second"])
    assert flat.extra_seconds == pytest.approx(0.042 - 0.019)


def read(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_csv_holds_every_figure_of_every_row(tmp_path):
    rows = compare_results(results_for(per_kernel=True))
    assert write(TRAFFIC_CSV, rows, tmp_path) == [tmp_path / "traffic.csv", tmp_path / "traffic_kernels.csv"]
    lines = read(tmp_path / "traffic.csv")
    assert [line["method"] for line in lines] == ["standard", "flat", "ghost", "flash"]
    assert lines[0]["dram_read_bytes"] == "1135307776"
    assert lines[0]["l2_to_sm_bytes"] == str(CAPTURE["traffic"]["l2_to_sm_bytes"])
    assert lines[0]["source"] == "measured"
    assert lines[0]["l2_tex_read_bytes"] == ""  # not there
    assert float(lines[1]["dram_bytes_ratio_to_standard"]) == pytest.approx(1.93, abs=0.01)
    assert float(lines[0]["median_step_ms"]) == 19.0
    kernels = read(tmp_path / "traffic_kernels.csv")
    assert len(kernels) == sum(len(kernel_rows(method)) for method in ("standard", "flat", "ghost", "flash"))
    first = kernels[0]
    assert (first["method"], first["family"], first["calls"]) == ("standard", "optimizer", "2")
    assert first["kernel"] == kernel_rows("standard")[0]["name"]


def test_an_estimate_is_called_one_in_both_csv_files(tmp_path):
    write(TRAFFIC_CSV, compare_results(results_for(measured=False)), tmp_path)
    assert {line["source"] for line in read(tmp_path / "traffic.csv")} == {"estimate"}
    assert all("ERR_NVGPUCTRPERM" in line["reason"] for line in read(tmp_path / "traffic.csv"))
    assert {line["kernels_source"] for line in read(tmp_path / "traffic_kernels.csv")} == {"estimate"}


def test_results_without_traffic_write_no_csv(tmp_path, make_result):
    assert write(TRAFFIC_CSV, compare_results([make_result()]), tmp_path) == []
    assert list(tmp_path.iterdir()) == []
