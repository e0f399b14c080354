"""The program that ncu looks at ends when its time is over, whatever ncu makes of the end of the range."""

from __future__ import annotations

import time

import torch

from dpscope.runner import ranged_step
from tests.forked import run_forked


def run(budget, step):
    def program():
        stopped = []
        torch.cuda.profiler.start = lambda: None
        torch.cuda.profiler.stop = lambda: stopped.append(time.monotonic())
        ranged_step.GRACE = 0.2
        with ranged_step._profiled(budget):
            time.sleep(step)
        print("stopped", len(stopped), "times")

    return run_forked(program)


def test_a_step_that_goes_on_after_its_budget_is_ended_with_the_program():
    done = run(budget=0.2, step=50)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == 'dpscope-outcome: {"status": "ok", "reason": null}\n'


def test_a_step_that_ends_soon_after_its_range_was_closed_ends_by_itself():
    assert run(budget=0.05, step=0.15).stdout == "stopped 2 times\n"


def test_a_step_within_its_budget_is_closed_once():
    assert run(budget=30, step=0).stdout == "stopped 1 times\n"
