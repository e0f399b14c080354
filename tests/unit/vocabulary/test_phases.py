"""Phases: in which order a step goes through them, how they nest, and that listening ends."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest

from dpscope.runner.steps import make_trainer
from dpscope.vocabulary import phases
from dpscope.vocabulary.phases import BACKWARD, CLIP, FORWARD, NOISE, OPTIMIZER, PHASES, in_phase, listening, phase


class Diary:
    """Writes down when each phase begins and ends."""

    def __init__(self):
        self.lines = []

    @contextmanager
    def __call__(self, name):
        self.lines.append(f"+{name}")
        yield
        self.lines.append(f"-{name}")


@pytest.fixture
def diary():
    return Diary()


STEPS = {
    "standard": ["+forward", "-forward", "+backward", "-backward", "+optimizer", "-optimizer"],
    "flat": [
        *("+forward", "-forward", "+backward", "-backward", "+clip", "-clip"),
        *("+noise", "-noise", "+optimizer", "-optimizer"),
    ],
    # The clip factors are found between the two backward passes.
    "ghost": [
        *("+forward", "-forward", "+backward", "+clip", "-clip", "-backward"),
        *("+noise", "-noise", "+optimizer", "-optimizer"),
    ],
}


@pytest.mark.parametrize("method", STEPS)
def test_a_step_goes_through_its_phases_in_order_every_time(make_spec, diary, method):
    trainer, batch = make_trainer(make_spec(method=method))
    for _ in range(2):
        with listening(diary):
            trainer.train_step(batch)
        assert diary.lines == STEPS[method]
        diary.lines.clear()


def test_every_phase_of_a_step_is_one_that_is_defined():
    assert {line[1:] for lines in STEPS.values() for line in lines} == set(PHASES)
    assert PHASES == (FORWARD, BACKWARD, CLIP, NOISE, OPTIMIZER)


def test_a_step_without_a_listener_announces_nothing(make_spec, diary):
    trainer, batch = make_trainer(make_spec(method="flat"))
    with listening(diary):
        pass
    trainer.train_step(batch)
    assert diary.lines == []


def test_phases_nest(diary):
    with listening(diary), phase(BACKWARD), phase(CLIP):
        pass
    assert diary.lines == ["+backward", "+clip", "-clip", "-backward"]


def test_several_listeners_hear_the_same_and_leave_in_reverse():
    heard = []

    def listener(who):
        @contextmanager
        def hear(name):
            heard.append(f"{who}+{name}")
            yield
            heard.append(f"{who}-{name}")

        return hear

    with listening(listener("a")), listening(listener("b")), phase(CLIP):
        pass
    assert heard == ["a+clip", "b+clip", "b-clip", "a-clip"]


def test_a_step_that_fails_ends_its_phases_and_leaves_no_listener(make_spec, diary):
    trainer, batch = make_trainer(make_spec(method="standard"))

    def broken_loss(model, batch):
        raise RuntimeError("the loss is broken")

    trainer.loss = broken_loss
    with pytest.raises(RuntimeError, match="the loss is broken"), listening(diary):
        trainer.train_step(batch)
    assert diary.lines == ["+forward", "-forward"]
    assert phases._listeners == []


def test_a_listener_that_fails_leaves_the_others_and_itself_in_order(diary):
    def broken(name):
        raise RuntimeError("no ears")

    with pytest.raises(RuntimeError, match="no ears"), listening(diary), listening(broken), phase(NOISE):
        pytest.fail("the phase was entered")
    assert diary.lines == ["+noise", "-noise"]
    assert phases._listeners == []


def test_a_function_of_a_library_can_be_made_a_phase(diary):
    def double(x, *, by=2):
        return x * by

    announced = in_phase(CLIP, double)
    with listening(diary):
        assert announced(3, by=5) == 15
    assert diary.lines == ["+clip", "-clip"]
    assert announced.__name__ == "double"


def test_flash_announces_clipping_and_noise(make_spec):

    trainer, batch = make_trainer(make_spec(method="flash"))
    seen = []

    def listener(name):
        seen.append(name)
        return nullcontext()

    with listening(listener):
        trainer.train_step(batch)
    assert seen == [FORWARD, BACKWARD, OPTIMIZER, CLIP, NOISE]  # on a GPU noise and update are one pass: no NOISE
