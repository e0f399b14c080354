"""Which steps are recorded, seen through the eyes of torch's own schedules."""

from __future__ import annotations

from dataclasses import fields

import pytest
from torch.profiler import ProfilerAction

from dpscope.errors import UserError
from dpscope.vocabulary.instruments import SCHEDULES, early_training, make_schedule, periodic, steady_state

RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


def recorded(schedule, steps=200):
    return [step for step in range(steps) if schedule(step) in RECORDING]


def test_early_training_looks_at_the_first_steps():
    assert recorded(early_training()) == [1, 2, 3, 4, 5]


def test_steady_state_looks_at_two_stretches_of_ten_after_fifty():
    assert recorded(steady_state()) == [*range(57, 67), *range(74, 84)]


def test_periodic_looks_at_three_steps_five_times():
    assert recorded(periodic()) == [start + n for start in (17, 27, 37, 47, 57) for n in range(3)]


def test_short_follows_the_warm_up_of_the_run_and_one_step_of_the_profilers():
    assert recorded(make_schedule("short", warmup=3).to_torch()) == [4, 5]
    assert recorded(make_schedule("short", warmup=0, active=1).to_torch()) == [1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_steps_of_a_schedule_are_enough_and_not_one_too_many(name):
    schedule = make_schedule(name, warmup=3)
    assert recorded(schedule.to_torch(), schedule.steps)[-1] == schedule.steps - 1
    assert schedule.to_torch()(schedule.steps - 1) == ProfilerAction.RECORD_AND_SAVE
    assert recorded(schedule.to_torch()) == recorded(schedule.to_torch(), schedule.steps)


def test_an_unknown_schedule_gets_a_sentence():
    with pytest.raises(UserError, match="unknown schedule 'often': choose one of short, early_training"):
        make_schedule("often", warmup=0)


def test_the_instrument_has_an_option_for_each_detail_of_a_recording():
    from dpscope.instruments.trace.capture import Detail
    from dpscope.vocabulary.instruments import INSTRUMENTS

    details = {each.name for each in fields(Detail)}
    assert {*details, "schedule", "trace_steps", "rank"} == set(INSTRUMENTS["trace"].options)
