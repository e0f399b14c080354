"""The Details page of ncu as data."""

from __future__ import annotations

import math

import pytest

from dpscope.instruments.ncu.details import read_details
from dpscope.instruments.ncu.reading import UnreadableReport
from tests import ROOT

CSV = """==PROF== Connected to process 7
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value","Rule Name","Rule Type","Rule Description"
"0","7","python","127.0.0.1","add","1","7","(512, 1, 1)","(64, 1, 1)","0","9.0",\
"GPU Speed Of Light Throughput","DRAM Throughput","%","91.5","","",""
"0","7","python","127.0.0.1","add","1","7","(512, 1, 1)","(64, 1, 1)","0","9.0",\
"GPU Speed Of Light Throughput","Elapsed Cycles","cycle","1,234,567","","",""
"0","7","python","127.0.0.1","add","1","7","(512, 1, 1)","(64, 1, 1)","0","9.0",\
"SpeedOfLight","","","","SOLBottleneck","INF","DRAM is the bottleneck."
"0","7","python","127.0.0.1","add","1","7","(512, 1, 1)","(64, 1, 1)","0","9.0",\
"Occupancy","Limited by","","none","","",""
"1","7","python","127.0.0.1","mul","1","7","(512, 1, 1)","(64, 1, 1)","0","9.0",\
"Occupancy","Achieved Occupancy","%","50","","",""
"""


@pytest.fixture
def launches(tmp_path):
    path = tmp_path / "details.csv"
    path.write_text(CSV, encoding="utf-8")
    return read_details(path)


def test_each_launch_has_its_own_metrics_by_section(launches):
    add, mul = launches
    assert (add.kernel, add.block, mul.kernel) == ("add", "(512, 1, 1)", "mul")
    assert add.sections == ["GPU Speed Of Light Throughput", "Occupancy"]
    assert list(add.section("speed of light")["metric"]) == ["DRAM Throughput", "Elapsed Cycles"]


def test_numbers_lose_their_separators_and_words_are_not_numbers(launches):
    add, _ = launches
    assert add.number("Elapsed Cycles") == 1_234_567
    assert math.isnan(add.number("Limited by"))


def test_an_unknown_metric_is_named_beside_those_that_are_there(launches):
    with pytest.raises(KeyError, match="Achieved Occupancy"):
        launches[1].number("DRAM Throughput")


def test_advice_is_kept_with_its_section(launches):
    assert launches[0].advice_on("Speed Of Light") == ["DRAM is the bottleneck."]
    assert launches[0].advice_on("Occupancy") == []


def test_a_file_that_is_no_details_page_is_refused_with_the_command_that_writes_one(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(UnreadableReport, match="--page details --csv"):
        read_details(path)


def test_a_page_of_a_real_report_has_advice_in_the_sections_of_its_metrics():
    (kernel,) = read_details(ROOT / "benchmarks/results/2026-11-16-h200-tutorials/recorded/addition.details.csv")
    assert kernel.number("DRAM Throughput") > 80 and kernel.number("Compute (SM) Throughput") < 20
    assert "greater than 80.0%" in kernel.advice_on("Speed Of Light")[0]
    assert {advice.section for advice in kernel.advice} <= set(kernel.sections)
