"""What a sweep says while it runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dpscope.commands.sweeping import SweepProgress


@pytest.fixture
def clock(monkeypatch):
    """Seconds since the start, moved by hand."""
    now = [0.0]
    monkeypatch.setattr("dpscope.commands.sweeping.time.monotonic", lambda: now[0])
    return now


def times_left(console, clock, make_result, specs, seconds):
    """What is said after each row, if rows of `specs` take so many seconds; there may be more specs than those."""
    progress = SweepProgress(console, specs)
    for row, (spec, taken) in enumerate(zip(specs, seconds, strict=False)):
        progress.row_started(row, spec)
        clock[0] += taken
        progress.row_finished(row, make_result(instrument=spec.instrument), kept=False)
    return [line.rpartition("(")[2].rstrip(")") for line in console.file.getvalue().splitlines()]


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200)


def test_the_time_left_is_told_by_instrument(console, clock, make_spec, make_result):
    """After a row of 2 s and one of 60 s, two more of each kind take 124 s, not four times the mean."""
    specs = [make_spec(instrument=name) for name in ("time", "ncu") * 3]
    first, second, _, fourth = times_left(console, clock, make_result, specs, (2, 60, 2, 60))
    assert first == "at least 10 s left"  # nothing is known of the other instrument
    assert second == "roughly 2 min 04 s left"
    assert fourth == "about 1 min 02 s left"


def test_rows_that_work_more_are_expected_to_take_longer_from_the_first_row_on(console, clock, make_spec, make_result):
    """Half of the first row's 8 s is its start; eight times the batch works eight times as long, ghost longer still."""
    specs = [make_spec(batch_size=2), make_spec(batch_size=16), make_spec(batch_size=2, method="ghost")]
    (first,) = times_left(console, clock, make_result, specs, (8,))
    work = 1.0 if specs[0].method == "standard" else 2.5
    assert first == f"roughly {round(4 + 4 * 8 + 4 + 4 * 2.5 / work)} s left"


def test_rows_that_were_kept_tell_nothing_about_time(console, clock, make_spec, make_result):
    SweepProgress(console, [make_spec(), make_spec()]).row_finished(0, make_result(), kept=True)
    assert "left" not in console.file.getvalue()
