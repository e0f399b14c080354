"""The tables of traffic as files: every figure, and an estimate that is called one."""

from __future__ import annotations

import csv

import pytest

from dpscope.instruments.ncu.metrics import TRAFFIC_FORMULAS
from dpscope.reports.export import TRAFFIC_CSV
from dpscope.reports.report import compare_results
from dpscope.results.payloads.ncu import BYTES
from tests.unit.reports.traffic_results import CAPTURE, kernel_rows, results_for
from tests.unit.reports.writing import write


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


def test_every_figure_that_is_counted_is_a_column(tmp_path):
    assert list(BYTES) == list(TRAFFIC_FORMULAS)
    write(TRAFFIC_CSV, compare_results(results_for()), tmp_path)
    assert set(TRAFFIC_FORMULAS) <= set(read(tmp_path / "traffic.csv")[0])
