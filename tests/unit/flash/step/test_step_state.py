"""The state of a step, alone: every transition from every pair of states, and what each refuses."""

from __future__ import annotations

import pytest
from torch import nn

from dpscope.errors import UserError
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.padding.rows import Rows
from dpscope.flash.step.step_state import (
    ABORTED,
    ACCUMULATING,
    APPLIED,
    CLOSED,
    COLLECTING,
    GIVEN_UP,
    LOST,
    OPENED,
    RECORDED,
    MicroBatchState,
    StepState,
    SumsState,
)

USABLE = [COLLECTING, ACCUMULATING, APPLIED]
ANYWHERE = [(micro, sums) for micro in MicroBatchState for sums in SumsState]


class Part:
    """Stands for a contribution: nothing here looks into one."""


def make_slot(name="weight"):
    return Slot(name, nn.Parameter(), "")


def make_state(micro=CLOSED, sums=COLLECTING, *, size=4, counted=0):
    """A state in `micro` and `sums`, reached by transitions; `counted` micro-batches of `size` are in the sums."""
    state = StepState()
    if sums is ACCUMULATING:
        state.skip_step()
    elif sums is APPLIED:
        state.apply(lambda: None)
    elif sums is LOST:
        state.lose(others=True)
        state.drop()
    elif sums is GIVEN_UP:
        state.skip_step()
        state.lose(others=True)
        state.drop()
    for _ in range(counted):
        state.open(size)
        state.record()
        state.close()
        state.count(size, 1.0)
    if micro is not CLOSED:
        state.open(size)
    if micro is RECORDED:
        state.record(make_slot())
    elif micro is ABORTED:
        state.fail()
    assert (state.micro_batch, state.sums) == (micro, sums)
    return state


def test_a_new_state_is_closed_and_holds_nothing():
    state = StepState()
    assert (state.micro_batch, state.sums) == (CLOSED, COLLECTING)
    assert (state.batch_size, state.size_in_backward) == (None, None)
    assert (state.micro_batches, state.samples, state.largest_clip, state.generation) == (0, 0, 0.0, 0)


@pytest.mark.parametrize(
    "name", ["micro_batch", "sums", "batch_size", "generation", "micro_batches", "samples", "largest_clip", "recorded"]
)
def test_what_it_holds_can_be_read_and_not_written(name):
    with pytest.raises(AttributeError):
        setattr(StepState(), name, 1)


@pytest.mark.parametrize("sums", SumsState)
@pytest.mark.parametrize("micro", [CLOSED, OPENED])
def test_a_forward_pass_opens_the_micro_batch(micro, sums):
    state = make_state(micro, sums)
    state.open(7)
    assert (state.micro_batch, state.sums, state.batch_size) == (OPENED, sums, 7)


@pytest.mark.parametrize("sums", SumsState)
def test_a_forward_pass_after_a_backward_pass_needs_a_closing_first(sums):
    with pytest.raises(RuntimeError, match="has to be closed"):
        make_state(RECORDED, sums).open(7)


def test_a_forward_pass_that_backward_runs_again_leaves_the_micro_batch_recorded():
    state = make_state(RECORDED)
    state.open(4, in_backward=True)
    assert (state.micro_batch, state.batch_size) == (RECORDED, 4)


@pytest.mark.parametrize(("micro", "sums"), ANYWHERE)
def test_a_backward_pass_records_from_every_state(micro, sums):
    state = make_state(micro, sums)
    state.record(make_slot())
    state.record(make_slot())
    assert (state.micro_batch, state.sums) == (RECORDED, sums)


def test_a_second_micro_batch_is_refused_where_accumulation_is_forbidden():
    state = make_state(counted=1)
    state.forbid_accumulation()
    state.open(4)
    with pytest.raises(UserError, match="a second backward pass since the last step"):
        state.record(make_slot())
    assert state.micro_batch is OPENED


@pytest.mark.parametrize("end", ["skip_step", "discard", "clear", "apply"])
def test_where_accumulation_is_forbidden_each_step_has_its_micro_batch(end):
    state = make_state(counted=1)
    state.forbid_accumulation()
    state.apply(lambda: None) if end == "apply" else getattr(state, end)()
    state.open(4)
    state.record(make_slot())
    state.record(make_slot())  # a second loss of the same forward pass
    assert state.recorded


@pytest.mark.parametrize("sums", USABLE)
def test_closing_hands_out_what_backward_has_left(sums):
    state, slot, untouched = make_state(OPENED, sums), make_slot(), make_slot("bias")
    part = Part()
    state.record(slot)
    slot.add(part)
    state.record(slot)
    assert state.close() == [(slot, [part])]
    assert slot.contributions == untouched.contributions == []
    assert (state.micro_batch, state.sums, state.batch_size) == (CLOSED, sums, None)


@pytest.mark.parametrize("sums", USABLE)
def test_the_micro_batch_of_an_empty_batch_is_closed_without_contributions(sums):
    state = make_state(CLOSED, sums)
    state.open(0)
    state.record()
    assert state.close() == []


@pytest.mark.parametrize("sums", USABLE)
def test_closing_where_there_was_no_backward_pass_gives_none(sums):
    state = make_state(CLOSED, sums)
    assert state.close() is None
    state.open(0)  # an empty batch need not be run backward
    assert state.close() is None
    assert state.micro_batch is CLOSED


@pytest.mark.parametrize("sums", USABLE)
def test_closing_after_a_forward_pass_alone_is_refused_and_changes_nothing(sums):
    state = make_state(OPENED, sums)
    with pytest.raises(UserError, match="there was a forward pass of 4 samples, but no backward pass"):
        state.close()
    assert (state.micro_batch, state.batch_size) == (OPENED, 4)


def test_a_forward_pass_alone_is_let_go_where_the_step_has_a_micro_batch_already():
    state = make_state(OPENED, counted=1)
    assert state.close() is None
    assert state.micro_batch is CLOSED


def test_counting_adds_up_samples_and_keeps_the_largest_clip():
    state = StepState()
    state.count(3, 1.0)
    state.count(5, 2.0)
    state.count(2, 0.5)
    state.count()
    assert (state.micro_batches, state.samples, state.largest_clip) == (4, 10, 2.0)


def test_a_recorded_micro_batch_is_one_of_those_a_step_would_use():
    assert make_state(RECORDED, counted=2).micro_batches == 3
    assert make_state(OPENED, counted=2).micro_batches == 2


@pytest.mark.parametrize(("micro", "sums"), ANYWHERE)
@pytest.mark.parametrize("transition", ["drop", "discard", "clear"])
def test_dropping_empties_slots_from_every_state(transition, micro, sums):
    state, slot = make_state(micro, sums), make_slot()
    if micro is RECORDED:
        state.record(slot)
        slot.add(Part())
    getattr(state, transition)()
    assert slot.contributions == []
    assert (state.micro_batch, state.batch_size) == (CLOSED, None)


@pytest.mark.parametrize("transition", ["close", "drop", "discard", "clear"])
def test_a_graph_can_be_run_backward_until_its_micro_batch_is_gone(transition):
    state = make_state(OPENED, counted=1)
    generation = state.generation
    getattr(state, transition)()  # as in: loss = ...; optimizer.zero_grad(); loss.backward()
    state.check_graph("layer", generation)
    assert state.size_in_backward == 4  # a checkpoint that is run again has to know
    state.record(make_slot())
    getattr(state, transition)()
    with pytest.raises(UserError, match="backward reached layer through a forward pass whose samples are already"):
        state.check_graph("layer", generation)
    assert state.size_in_backward is None


@pytest.mark.parametrize(
    ("sums", "after", "kept"), [(COLLECTING, COLLECTING, 0), (ACCUMULATING, ACCUMULATING, 1), (APPLIED, APPLIED, 0)]
)
def test_discarding_counts_anew_except_in_a_logical_batch(sums, after, kept):
    state = make_state(CLOSED, sums, counted=1)
    state.discard()
    assert (state.sums, state.micro_batches, state.samples, state.largest_clip) == (after, kept, 4 * kept, 1.0 * kept)


@pytest.mark.parametrize(
    ("sums", "after", "cleared"),
    [
        (COLLECTING, COLLECTING, True),
        (ACCUMULATING, ACCUMULATING, False),
        (APPLIED, COLLECTING, True),
        (LOST, COLLECTING, True),
        (GIVEN_UP, GIVEN_UP, True),
    ],
)
def test_clearing_says_whether_the_sums_go_too(sums, after, cleared):
    state = make_state(RECORDED, sums)
    assert state.clear() is cleared
    assert (state.sums, state.micro_batches) == (after, 0)


def test_a_draw_is_given_up_if_a_batch_of_it_is_cleared_that_is_in_its_sums():
    state = make_state(CLOSED, ACCUMULATING, counted=1)
    assert state.clear()
    assert (state.micro_batch, state.sums, state.micro_batches) == (CLOSED, GIVEN_UP, 0)


@pytest.mark.parametrize(
    ("sums", "others", "after"),
    [
        (COLLECTING, False, COLLECTING),
        (COLLECTING, True, LOST),
        (ACCUMULATING, True, GIVEN_UP),
        (APPLIED, False, APPLIED),
        (APPLIED, True, GIVEN_UP),
        (LOST, False, LOST),
        (GIVEN_UP, False, GIVEN_UP),
    ],
)
def test_sums_that_an_error_drops_are_missed_if_others_were_among_them(sums, others, after):
    state = make_state(RECORDED, sums)
    state.lose(others=others)
    assert (state.micro_batch, state.sums, state.micro_batches, state.samples) == (ABORTED, after, 0, 0)
    assert state.take_recorded() == []


def test_a_batch_whose_closing_failed_is_run_again_before_the_step():
    state = make_state(RECORDED, ACCUMULATING)
    state.fail()
    with pytest.raises(UserError, match="run forward and backward of it again"):
        state.begin_step()
    state.open(4)
    state.record(make_slot())
    state.begin_step()
    assert state.accumulating


@pytest.mark.parametrize("doing", ["begin_step", "skip_step", "close"])
def test_no_step_is_taken_without_sums_that_were_lost(doing):
    state = make_state(RECORDED, LOST)
    with pytest.raises(UserError, match="an error has dropped the clipped sums of earlier batches of this step"):
        getattr(state, doing)()
    state.clear()
    state.begin_step()


def test_a_draw_that_was_given_up_ends_with_another():
    state = StepState()
    state.open(4, rows=Rows(4, 8, 1, True))
    state.record()
    state.close()
    state.count(4, 1.0, Rows(4, 8, 1, True))
    state.skip_step()
    state.lose(others=True)
    with pytest.raises(UserError, match="this draw was given up"):
        state.close()
    state.meet(Rows(2, 8, 1))
    assert state.given_up
    state.meet(Rows(2, 8, 2))
    assert state.sums is COLLECTING


def test_dropping_leaves_the_sums_alone():
    state = make_state(RECORDED, counted=1)
    state.drop()
    assert (state.micro_batches, state.samples, state.largest_clip) == (1, 4, 1.0)


@pytest.mark.parametrize("sums", [COLLECTING, ACCUMULATING])
@pytest.mark.parametrize("micro", [CLOSED, OPENED, RECORDED])
def test_a_step_begins_where_nothing_is_applied(micro, sums):
    make_state(micro, sums).begin_step()


@pytest.mark.parametrize("transition", ["begin_step", "skip_step", "apply"])
def test_sums_that_were_applied_are_cleared_before_the_next_step(transition):
    state = make_state(RECORDED, APPLIED)
    arguments = [lambda: pytest.fail("accounted")] if transition == "apply" else []
    with pytest.raises(ValueError, match="Gradients haven't been cleared since the last optimizer step"):
        getattr(state, transition)(*arguments)
    assert state.sums is APPLIED
    state.clear()
    state.begin_step()


@pytest.mark.parametrize("sums", [COLLECTING, ACCUMULATING])
def test_a_skipped_step_makes_a_logical_batch_that_counts_as_one(sums):
    state = make_state(CLOSED, sums, counted=1)
    state.skip_step()
    assert (state.sums, state.micro_batches, state.samples, state.largest_clip) == (ACCUMULATING, 0, 4, 1.0)


@pytest.mark.parametrize(("sums", "after"), [(COLLECTING, COLLECTING), (ACCUMULATING, COLLECTING), (APPLIED, APPLIED)])
def test_a_completed_logical_batch_is_dropped_by_zero_grad(sums, after):
    state = make_state(CLOSED, sums)
    state.complete()
    assert state.sums is after
    assert state.clear()


@pytest.mark.parametrize("sums", [COLLECTING, ACCUMULATING])
def test_applying_lets_the_accountant_see_how_many_micro_batches_there_were(sums):
    state, seen = make_state(CLOSED, sums, counted=2), []
    state.apply(lambda: seen.append((state.sums, state.micro_batches)))
    assert seen == [(APPLIED, 2)]
    assert (state.sums, state.micro_batches, state.largest_clip) == (APPLIED, 0, 0.0)


def test_sums_count_as_applied_even_if_accounting_for_them_fails():
    state = make_state(counted=1)
    with pytest.raises(ZeroDivisionError):
        state.apply(lambda: 1 / 0)
    assert state.sums is APPLIED


@pytest.mark.parametrize("micro", MicroBatchState)
def test_passes_that_are_expected_leave_the_state_as_it_was(micro):
    state = make_state(micro)
    before = state.micro_batch, state.batch_size, state.size_in_backward
    with pytest.raises(ZeroDivisionError), state.expecting(9):
        assert state.batch_size == 9
        raise ZeroDivisionError
    assert (state.micro_batch, state.batch_size, state.size_in_backward) == before
