"""What a peak was made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpscope.reports.memory.text import composition_of, snapshots_of, timeline_of
from dpscope.reports.report import compare_results
from dpscope.results.derived import Composition, PhaseSpan

MIB = 2**20


def row_of(*results):
    (row,) = compare_results(results)
    return row


@pytest.mark.parametrize("method", ["standard", "flat", "ghost", "flash"])
def test_the_components_add_up_to_the_peak(make_memory_result, method):
    result = make_memory_result(method)
    assert composition_of(row_of(result)).total == result.memory["peak_bytes"]


def test_it_is_found_behind_a_result_of_the_time_instrument(make_result, make_memory_result):
    row = row_of(make_result(method="flat"), make_memory_result("flat"))
    assert set(row.measured) == {"time", "memory"}
    assert composition_of(row).components["per_sample_gradients"] == 800 * MIB


def test_who_made_the_peak_is_told_in_words(make_memory_result):
    assert composition_of(row_of(make_memory_result())).maker == "backward: aten::bmm in blocks.3.up"
    assert Composition({}, phase="noise", operator="aten::normal").maker == "noise: aten::normal"
    assert Composition({}).maker is None


def test_a_row_that_was_only_timed_or_failed_has_none(make_result, make_memory_result):
    assert composition_of(row_of(make_result())) is None
    assert composition_of(row_of(replace(make_memory_result(), status="oom"))) is None


def test_an_older_file_is_read_by_its_breakdown_and_the_rest_of_its_peak_is_unattributed(make_result):
    breakdown = {
        "model_parameters_mb": 10.0,
        "gradients_mb": 5.0,
        "total_allocated_mb": 18.0,
        "peak_allocated_mb": 20.0,
    }
    composition = composition_of(row_of(replace(make_result(), memory={}, breakdown=breakdown)))
    assert composition.components == {"model_parameters": 10 * MIB, "gradients": 5 * MIB, "unattributed": 5 * MIB}


def test_only_the_remainder_may_be_below_zero(make_memory_result):
    composition = composition_of(row_of(make_memory_result(unattributed=-3)))
    assert composition.components["unattributed"] == -3 * MIB
    assert composition.total == (701 - 3) * MIB


def test_the_extra_has_a_sign_for_every_component_that_either_holds():
    extra = Composition({"gradients": 7.0, "norm_samples": 1.0}).extra_over(
        Composition({"gradients": 10.0, "activations": 2.0})
    )
    assert extra == {"gradients": -3.0, "activations": -2.0, "norm_samples": 1.0}


def test_modules_come_heaviest_first(make_memory_result):
    composition = composition_of(row_of(make_memory_result()))
    assert [module for module, _ in composition.modules] == [f"blocks.{n}.up" for n in (4, 3, 2, 1, 0)]


def test_a_timeline_knows_its_peak_and_its_phases(make_memory_result):
    result = make_memory_result("ghost")
    timeline = timeline_of(row_of(result))
    assert timeline.totals[timeline.peak] == result.memory["tracked_peak_bytes"]
    assert [phase.name for phase in timeline.phases] == ["forward", "backward", "clip", "noise", "optimizer"]


@pytest.mark.parametrize(
    "timeline",
    [
        {},
        {"components": ["inputs"]},
        {"components": [], "points": [[0], [1]]},
        {"components": ["inputs"], "points": [[0, 1]]},
        {"components": ["inputs"], "points": [[0, 1], [1]]},
        {"components": ["inputs"], "points": [[1, 1], [0, 2]]},
    ],
)
def test_a_timeline_that_cannot_be_drawn_is_none(make_memory_result, timeline):
    assert timeline_of(row_of(replace(make_memory_result(), timeline=timeline))) is None


def test_phases_are_cut_to_the_events_and_those_outside_are_left_out(make_memory_result):
    phases = [
        {"name": name, "start": start, "end": end} for name, start, end in (("b", 1, 9), ("a", -3, 1), ("c", 7, 9))
    ]
    timeline = {"components": ["inputs"], "points": [[0, 1], [2, 2]], "phases": phases}
    read = timeline_of(row_of(replace(make_memory_result(), timeline=timeline)))
    assert read.phases == [PhaseSpan("a", 0, 1), PhaseSpan("b", 1, 2)]


def test_snapshots_are_stages_and_bytes(make_memory_result):
    stages = {"0_model_loaded": 100 * MIB, "3_after_warmup": 300 * MIB, "iter0_after_forward": 600 * MIB}
    assert snapshots_of(row_of(make_memory_result())) == stages
