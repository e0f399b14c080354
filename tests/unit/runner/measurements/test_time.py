"""Notes on a row's times."""

import pytest

from dpscope.runner.measurements.time import notes_on_host


@pytest.mark.parametrize(("busy", "told"), [(10.7, True), (29.1, True), (29.2, False), (43.7, False), (0.0, False)])
def test_a_gpu_that_is_idle_for_more_than_a_third_of_a_step_is_told_of(busy, told):
    notes = notes_on_host(busy, 43.7, "flash")
    assert bool(notes) == told
    if busy == 10.7:
        assert notes[0]["sentence"].startswith("The GPU is busy 10.7 ms of a step of 43.7 ms: flash is host-bound")
        assert "--cuda-graph" in notes[0]["sentence"]
        assert "--cuda-graph" not in notes_on_host(busy, 43.7, "ghost")[0]["sentence"]
