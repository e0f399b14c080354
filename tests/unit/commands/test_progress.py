"""What a sweep says while it runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dpscope.commands.console import SweepProgress


@pytest.fixture
def clock(monkeypatch):
    """Seconds since the start, moved by hand."""
    now = [0.0]
    monkeypatch.setattr("dpscope.commands.console.time.monotonic", lambda: now[0])
    return now


def test_the_time_left_is_told_by_instrument(clock, make_spec, make_result):
    """After a row of 2 s and one of 60 s, two more of each kind take 124 s, not four times the mean.

    The first rows are the quickest: until four are measured, and every instrument is, it is a lower bound.
    """
    console = Console(file=io.StringIO(), width=200)
    progress = SweepProgress(console, ["time", "ncu", "time", "ncu", "time", "ncu"])
    for row, (instrument, seconds) in enumerate([("time", 2), ("ncu", 60), ("time", 2), ("ncu", 60)]):
        progress.row_started(row, make_spec(instrument=instrument))
        clock[0] += seconds
        progress.row_finished(row, make_result(instrument=instrument), kept=False)
    first, second, _, fourth = console.file.getvalue().splitlines()
    assert first.endswith("(at least 10 s left)")
    assert second.endswith("(at least 2 min 04 s left)")
    assert fourth.endswith("(about 1 min 02 s left)")


def test_rows_that_were_kept_tell_nothing_about_time(clock, make_result):
    console = Console(file=io.StringIO(), width=200)
    SweepProgress(console, ["time", "time"]).row_finished(0, make_result(), kept=True)
    assert "left" not in console.file.getvalue()
