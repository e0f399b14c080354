"""The time instrument, under a clock that moves only when a step says so."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpscope.instruments import timing
from dpscope.instruments.timing import CpuClock, Timing, time_steps


class FakeTime:
    """Seconds that pass only inside a step."""

    def __init__(self, *durations):
        self.now = 1000.0
        self._durations = iter(durations)
        self.steps = 0

    def step(self):
        self.now += next(self._durations)
        self.steps += 1

    def read(self):
        return self.now


@pytest.fixture
def timed(monkeypatch):
    """Time steps that take the given seconds."""

    def run(*durations, **options):
        fake = FakeTime(*durations)
        monkeypatch.setattr(timing, "CpuClock", lambda: CpuClock(fake.read))
        taken = time_steps(fake.step, device="cpu", **options)
        assert fake.steps == len(durations)
        return taken

    return run


def test_every_step_is_kept_in_order_and_warm_up_is_not_counted(timed):
    taken = timed(9.0, 7.0, 0.010, 0.030, 0.020, warmup=2, steps=3)
    assert taken.step_ms == pytest.approx([10, 30, 20])
    assert taken.median_ms == pytest.approx(20)


def test_without_warm_up_the_first_step_counts(timed):
    assert timed(0.5, warmup=0, steps=1).step_ms == pytest.approx([500])


def test_the_mean_and_the_spread_are_of_the_counted_steps(timed):
    figures = timed(5.0, *(0.001 * n for n in range(1, 12)), warmup=1, steps=11).to_dict()
    assert figures["median_ms"] == pytest.approx(6)
    assert figures["p10_ms"] == pytest.approx(2)
    assert figures["p90_ms"] == pytest.approx(10)
    assert figures["mean_ms"] == pytest.approx(6)
    assert len(figures["step_ms"]) == 11


def test_one_slow_step_moves_the_mean_but_not_the_median():
    figures = Timing([10.0] * 9 + [1000.0]).to_dict()
    assert figures["median_ms"] == 10.0
    assert figures["mean_ms"] == pytest.approx(109)


def test_the_clock_stands_still_between_the_steps_of_progress_reports(timed, monkeypatch):
    events = []
    timed(1.0, 2.0, 3.0, warmup=1, steps=2, progress=lambda *event: events.append(event))
    assert events == [("warm-up", 1, 1), ("step", 1, 2), ("step", 2, 2)]


def test_the_real_clock_never_runs_backwards():
    taken = time_steps(lambda: None, device="cpu", warmup=0, steps=100)
    assert all(step >= 0 for step in taken.step_ms)


@pytest.mark.parametrize(
    ("values", "p10", "p90"),
    [([7.0], 7.0, 7.0), ([10.0, 0.0], 1.0, 9.0), ([5.0, 1.0, 4.0, 2.0, 3.0], 1.4, 4.6)],
)
def test_a_percentile_lies_on_the_line_between_the_nearest_values(values, p10, p90):
    figures = Timing(values).to_dict()
    assert (figures["p10_ms"], figures["p90_ms"]) == pytest.approx((p10, p90))


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=50))
def test_percentiles_agree_with_those_of_numpy(values):
    figures = Timing(values).to_dict()
    assert [figures["p10_ms"], figures["p90_ms"]] == pytest.approx(list(numpy.percentile(values, [10, 90])))
