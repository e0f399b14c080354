"""Conservation: what does not add up is found, wherever the byte was lost."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest

from dpscope.results.derived import NotConserved, conservation_faults, require_conserved
from dpscope.runner.measure import measure


@pytest.fixture(scope="module")
def result(make_spec):
    return measure(make_spec(instrument="memory", method="ghost"))


def test_a_measured_result_adds_up(result):
    assert conservation_faults(result) == []


def lose_a_component(result):
    result.memory["peak"]["components"]["activations"] -= 1


def count_a_module_twice(result):
    result.memory["modules"].append(result.memory["modules"][0])


def lower_the_timelines_peak(result):
    timeline = result.timeline
    timeline["points"][timeline["peak"]][1] -= 8


def raise_another_point(result):
    timeline = result.timeline
    timeline["points"][timeline["peak"] - 1][1] += 2**30


def explain_what_is_not_there(result):
    result.memory["unattributed"].append({"what": "cuBLAS workspaces", "bytes": 512})


def round_the_breakdown(result):
    result.breakdown["gradients_mb"] += 0.01


def forget_the_peak(result):
    result.memory["peak_bytes"] += 1


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_component,
        count_a_module_twice,
        lower_the_timelines_peak,
        raise_another_point,
        explain_what_is_not_there,
        round_the_breakdown,
        forget_the_peak,
    ],
)
def test_what_does_not_add_up_is_said(result, damage):
    parts = {name: deepcopy(getattr(result, name)) for name in ("memory", "timeline", "breakdown")}
    damaged = replace(result, **parts)
    damage(damaged)
    assert conservation_faults(damaged)
    assert conservation_faults(result) == []


def test_every_point_has_to_add_up():
    require_conserved([(1, 2), (0, 4)], [3, 4])
    with pytest.raises(NotConserved, match="event 1"):
        require_conserved([(1, 2), (0, 4)], [3, 5])
    with pytest.raises(NotConserved, match="event 0"):
        require_conserved([(4, -1)], [3])
    with pytest.raises(NotConserved, match="2 points"):
        require_conserved([(1, 2), (0, 4)], [3])
