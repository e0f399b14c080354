"""Which private method wins, what it saves, and when nothing is said because the measurement does not carry it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpscope.reports.report import compare_results
from dpscope.reports.story import tell
from tests.unit.reports.traffic_results import results_for

GIB = 2**30


@pytest.fixture
def told(make_result):
    """The story of methods, each given as (steps in ms, peak in GiB) or as a status."""

    def tell_of(**methods):
        return tell(compare_results(_result(make_result, name, given) for name, given in methods.items()))

    return tell_of


def _result(make_result, method, given):
    if isinstance(given, str):
        return make_result(method=method, status=given, steps=5)
    steps, peak = given
    result = make_result(method=method, median=sorted(steps)[len(steps) // 2], peak=int(peak * GIB), steps=5)
    spread = {"step_ms": list(steps) * 2, "p10_ms": min(steps), "p90_ms": max(steps)}
    return replace(result, timing={**result.timing, **spread})


STANDARD = ((99, 100, 101), 10)


def test_the_winner_is_named_with_its_cost_and_what_it_saves_against_flat(told):
    story = told(
        standard=STANDARD, flat=((250, 256, 260), 14), ghost=((340, 347, 350), 11), flash=((108, 109, 110), 9.6)
    )
    assert story.winner == "flash"
    assert story.sentences == [
        "Of the private methods flash costs least: 1.09× the time and 0.96× the memory of ordinary training.",
        "Against flat it saves 147.0 ms (57% of the time) and 4.40 GiB (31% of the memory) a step.",
    ]


def test_without_flat_savings_are_told_against_the_next_best(told):
    story = told(standard=STANDARD, ghost=((340, 347, 350), 11), flash=((108, 109, 110), 9))
    assert story.sentences[1].startswith("Against ghost it saves 238.0 ms")


def test_nobody_wins_on_a_difference_within_the_spread(told):
    story = told(standard=STANDARD, flat=((100, 110, 120), 10), flash=((105, 109, 125), 10))
    assert story.winner is None
    assert "Between flat and flash the measurement sees no difference beyond its spread." in story.sentences


def test_of_two_that_are_equally_fast_the_leaner_wins_and_no_time_is_saved(told):
    story = told(standard=STANDARD, flat=((100, 110, 120), 14), flash=((105, 109, 125), 10))
    assert story.winner == "flash"
    assert story.sentences[1] == "Against flat it saves 4.00 GiB (29% of the memory) a step."


def test_peaks_that_differ_by_rounding_are_equal(told):
    story = told(standard=STANDARD, flat=((200, 201, 202), 10.0), flash=((100, 101, 102), 10.05))
    assert story.winner == "flash"
    assert not any("memory) a step" in sentence for sentence in story.sentences)


def test_fast_against_lean_is_the_readers_choice(told):
    story = told(standard=STANDARD, flat=((120, 121, 122), 14), ghost=((190, 200, 210), 10))
    assert story.winner is None
    assert any(
        sentence.startswith("No method is best at both: flat is the fastest (121.0 ms), ghost needs the least memory")
        for sentence in story.sentences
    )


def test_times_that_varied_too_much_get_no_verdict_and_the_reason(told):
    story = told(standard=STANDARD, flat=((100, 300, 900), 14), flash=((108, 109, 110), 9))
    assert (story.winner, story.badge) == ("flash", "least memory")
    reason = "No verdict on the time of flat: step times varied by more than 1.5×"
    assert any(text.startswith(reason) for text in story.sentences)


def test_an_unsteady_method_without_standard_gets_no_verdict_either(told):
    story = told(flat=((100, 300, 900), 14), flash=((108, 109, 110), 9))
    assert story.badge == "least memory"


@pytest.mark.parametrize("steps", [(100,), (100, 100)])
def test_fewer_than_five_steps_give_no_verdict_on_time(told, steps):
    """The fixture times each given step twice: two and four steps."""
    story = told(standard=((5000,) * len(steps), 10), flat=(steps, 10), flash=(steps, 10))
    assert story.winner is None
    assert not any("the time" in sentence.replace("on the time", "") for sentence in story.sentences)
    assert story.sentences[0] == "flat and flash need the same memory, to within 1%."
    assert story.sentences[-1] == (
        "No verdict on the time of flat and flash: fewer than 5 steps were timed. Measure with --steps 5 or more."
    )


def test_a_standard_of_few_steps_is_no_denominator(told):
    story = told(standard=((5000, 5000), 10), flash=((100, 101, 102), 10))
    assert any(text.startswith("No verdict on the time of flash: fewer than 5 steps") for text in story.sentences)


def test_running_out_of_memory_is_a_finding(told):
    story = told(standard=STANDARD, flat="oom", ghost="oom", flash=((108, 109, 110), 9))
    assert "flash takes 1.09× the time and 0.90× the memory of ordinary training." in story.sentences
    assert "flat and ghost ran out of memory here." in story.sentences
    assert "flash is the only private method that fits." in story.sentences


def test_a_method_that_was_not_run_does_not_make_another_the_only_one_that_fits(told):
    story = told(standard=STANDARD, ghost="skipped", flash=((108, 109, 110), 9))
    assert "ghost was not run here." in story.sentences
    assert not any("only" in sentence for sentence in story.sentences)


def test_without_standard_costs_are_absolute_and_the_reason_is_given(told):
    story = told(flat=((250, 256, 260), 14), flash=((108, 109, 110), 9))
    assert story.sentences[0] == "Of the private methods flash costs least: 109.0 ms and 9.00 GiB a step."
    assert story.sentences[-1] == "There are no ratios: ordinary training (standard) was not measured at this size."


def test_standard_alone_has_no_private_method_to_tell_of(told):
    assert told(standard=STANDARD).sentences == []


def test_when_everything_failed_only_that_is_said(told):
    assert told(standard="failed", flat="failed").sentences == [
        "standard and flat failed here.",
        "There are no ratios: ordinary training (standard) has no figures at this size.",
    ]


@pytest.mark.parametrize(("measured", "sign"), [(True, ""), (False, "≈")])
def test_bytes_are_told_beside_time_and_memory_and_an_estimate_is_marked(measured, sign):
    rows = compare_results(results_for("standard", "flat", measured=measured))
    (sentence,) = tell(rows).sentences
    assert f"and {sign}" in sentence
    assert sentence.endswith("× the DRAM bytes of ordinary training.")
    assert ("≈" in sentence) is not measured
