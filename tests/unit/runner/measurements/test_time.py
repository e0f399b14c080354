"""Notes on a row's times."""

from unittest import mock

import pytest
import torch

from dpscope.runner.measurements import time
from dpscope.runner.measurements.time import LEAST_STEPS, TURNS, notes_on_host, notes_on_turns, time_in_turns
from dpscope.runner.steps import TrainingSteps
from tests.unit.runner.rank_outcomes import spec


@pytest.mark.parametrize(("busy", "told"), [(10.7, True), (29.1, True), (29.2, False), (43.7, False), (0.0, False)])
def test_a_gpu_that_is_idle_for_more_than_a_third_of_a_step_is_told_of(busy, told):
    notes = notes_on_host(busy, 43.7, "flash")
    assert bool(notes) == told
    if busy == 10.7:
        assert notes[0]["sentence"].startswith("The GPU is busy 10.7 ms of a step of 43.7 ms: flash is host-bound")
        assert "--cuda-graph" in notes[0]["sentence"]
        assert "--cuda-graph" not in notes_on_host(busy, 43.7, "ghost")[0]["sentence"]


def test_a_host_bound_row_is_timed_in_turns_with_ordinary_training():
    row = spec(gpus=1)
    progress: list[tuple[str, int, int]] = []
    timing = time_in_turns(row, TrainingSteps(row), 100.0, lambda *said: progress.append(said))
    assert len(timing["in_turns"]["ratios"]) == TURNS
    assert all(ratio > 0 for ratio in timing["in_turns"]["ratios"])
    assert timing["in_turns"]["steps"] == LEAST_STEPS
    assert progress[-1] == ("in turns with standard", TURNS, TURNS)
    (note,) = notes_on_turns(timing, "flash")
    assert f"the median of {TURNS} pairs of blocks of {LEAST_STEPS} steps" in note["sentence"]


def test_turns_are_left_out_where_two_models_do_not_fit(monkeypatch):
    row = spec(gpus=1)
    steps = TrainingSteps(row)
    monkeypatch.setattr(time, "TrainingSteps", mock.Mock(side_effect=torch.OutOfMemoryError))
    assert time_in_turns(row, steps, 100.0) == {}
    assert notes_on_turns({}, "flash") == []
