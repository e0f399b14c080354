"""The analyses, held against torch's own averages and against sizes that can be worked out."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch
from torch.profiler import profile

from dpscope.errors import UserError
from dpscope.instruments.trace import (
    advanced_analysis,
    basic_analysis,
    detect_bottlenecks,
    export_trace,
    generate_performance_report,
    memory_analysis,
    operator_table,
    read_trace,
)
from dpscope.instruments.trace.events import parse_events
from tests.unit.instruments.trace.handmade import gpu_step

B, D = 48, 96
RECURSIVE = "aten::arange"  # what sort calls calls itself


@pytest.fixture(scope="module")
def profiler():
    weight = torch.randn(D, D, requires_grad=True)
    x = torch.randn(B, D)
    (x @ weight).sum().backward()
    with profile(record_shapes=True, profile_memory=True) as recorded:
        for _ in range(3):
            (x @ weight).relu().sum().backward()
        torch.randn(7).sort()
    return recorded


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A file of the same kind; a profiler can be exported only once, and the analyses must not use that up."""
    x = torch.randn(B, D)
    with profile(record_shapes=True, profile_memory=True) as recorded:
        (x @ x.T).relu()
    basic_analysis(recorded)
    return export_trace(recorded, tmp_path_factory.mktemp("exported") / "trace.json.gz"), recorded


def test_times_calls_and_memory_of_operators_are_torchs_own(profiler):
    ours = operator_table(profiler).set_index("operator")
    theirs = [row for row in profiler.key_averages() if row.key != "[memory]"]
    assert set(ours.index) == {row.key for row in theirs}
    for row in theirs:
        mine = ours.loc[row.key]
        assert mine.calls == row.count
        if row.key != RECURSIVE:
            assert 1e3 * mine.cpu_ms == pytest.approx(row.cpu_time_total, rel=0.01, abs=1)
        assert 1e3 * mine.self_cpu_ms == pytest.approx(row.self_cpu_time_total, rel=0.01, abs=1)
        assert mine.self_cpu_bytes == row.self_cpu_memory_usage


def test_an_operator_that_calls_itself_is_counted_once(profiler):
    calls = [event for event in profiler.events() if event.name == RECURSIVE]
    outer = max(event.cpu_time_total for event in calls)
    assert len(calls) == 2
    assert 1e3 * operator_table(profiler).set_index("operator").loc[RECURSIVE, "cpu_ms"] == pytest.approx(outer, abs=1)


def test_an_exported_file_gives_the_same_operators(exported):
    path, recorded = exported
    from_file, live = operator_table(path).set_index("operator"), operator_table(recorded).set_index("operator")
    assert from_file.calls.to_dict() == live.calls.to_dict()
    assert from_file.self_cpu_bytes.to_dict() == live.self_cpu_bytes.to_dict()
    assert from_file.cpu_ms.to_dict() == pytest.approx(live.cpu_ms.to_dict(), abs=2e-3)


def test_basic_analysis_sorts_by_each_figure_and_leaves_out_what_was_not_recorded(profiler):
    analysis = basic_analysis(profiler, limit=4)
    assert list(analysis.tables) == ["by CPU time", "by CPU memory"]
    for name, column in (("by CPU time", "cpu_ms"), ("by CPU memory", "self_cpu_bytes")):
        table = analysis[name]
        assert len(table) == 4
        assert list(table[column]) == sorted(operator_table(profiler)[column], reverse=True)[:4]


def test_shapes_tell_calls_of_one_operator_apart(profiler):
    by_shape = advanced_analysis(profiler, limit=1000)["by input shape"]
    products = by_shape[by_shape.operator == "aten::mm"].set_index("input_shapes").calls
    assert products.to_dict() == {str([[B, D], [D, D]]): 3, str([[D, B], [B, D]]): 3}


def test_totals_are_the_sums_of_the_whole_recording(profiler):
    totals = advanced_analysis(profiler).totals
    table = operator_table(profiler)
    assert totals["operators called"] == table.calls.sum()
    assert totals["CPU ms"] == pytest.approx(table.self_cpu_ms.sum())


def test_memory_over_time_ends_where_the_sum_of_all_changes_is(profiler):
    analysis = memory_analysis(profiler)
    timeline = analysis["over time"]
    assert list(timeline.time_ms) == sorted(timeline.time_ms)
    assert timeline.total_bytes.iloc[-1] == timeline.bytes.sum()
    assert analysis.totals["highest cpu bytes"] == timeline.total_bytes.max() >= 4 * B * D


def test_memory_that_nobody_recorded_gets_a_sentence():
    with profile() as recorded:
        torch.zeros(3).add(1)
    with pytest.raises(UserError, match="profile_memory=True"):
        memory_analysis(recorded)


def test_bottlenecks_are_what_is_above_the_threshold_slowest_first(profiler):
    table = operator_table(profiler)
    threshold = sorted(table.cpu_ms)[-4]
    found = detect_bottlenecks(profiler, threshold_ms=threshold)
    assert [each.cpu_ms for each in found] == sorted(table.cpu_ms, reverse=True)[:3]
    assert detect_bottlenecks(profiler, threshold_ms=1e6) == []


def test_a_bottleneck_names_the_shapes_it_was_called_with(profiler):
    product = next(each for each in detect_bottlenecks(profiler, threshold_ms=0) if each.name == "aten::mm")
    assert set(product.input_shapes) == {str([[B, D], [D, D]]), str([[D, B], [B, D]])}
    assert product.count == 6


def test_on_a_gpu_device_time_is_inclusive_and_comes_first(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(gpu_step()))
    table = operator_table(path).set_index("operator")
    assert table.loc["aten::linear", "device_ms"] == pytest.approx(0.100)
    assert table.loc["aten::linear", "self_device_ms"] == 0
    assert table.loc["aten::addmm", "self_device_ms"] == pytest.approx(0.100)
    node = "autograd::engine::evaluate_function: AddmmBackward0"
    assert table.loc[node, "device_ms"] == pytest.approx(0.150)
    assert next(iter(basic_analysis(path).tables)) == "by device time"
    totals = advanced_analysis(path).totals
    assert (totals["kernels"], totals["device ms"]) == (5, pytest.approx(0.425))
    slowest = detect_bottlenecks(path, threshold_ms=0.12)
    assert {each.name for each in slowest} == {node, "AddmmBackward0", "aten::mm"}


def test_the_report_has_every_part(profiler):
    report = generate_performance_report(profiler, "my model")
    assert report.startswith("Performance of my model")
    for words in ("by operator:", "by input shape:", "totals:", "Memory", "aten::mm"):
        assert words in report
    assert "times device time" not in report  # there is none


def test_printing_comes_second(profiler, capsys):
    analysis = basic_analysis(profiler)
    assert isinstance(analysis["by CPU time"], pd.DataFrame)
    assert capsys.readouterr().out == ""
    basic_analysis(profiler, show=True)
    assert capsys.readouterr().out == f"{analysis}\n"


def test_a_profiler_that_recorded_nothing_gets_a_sentence():
    with pytest.raises(UserError, match="recorded nothing"):
        basic_analysis(profile())


def test_a_trace_that_was_read_can_be_analysed_again_and_again(exported):
    trace = read_trace(exported[0])
    assert str(basic_analysis(trace)) == str(basic_analysis(trace))
    assert len(operator_table(parse_events(gpu_step()))) == 10
