"""Doubt of a figure: the one definition that every table, chart, figure and export uses (docs/method.md)."""

from __future__ import annotations

from collections.abc import Iterable

from dpscope.units import MISSING

STEADY = 1.5  # a 90th percentile this many times the 10th: the machine was busy
FEWEST_STEPS = 5  # with fewer timed steps there is no spread to speak of, and no verdict
STRETCHED = 2.0  # a traced step this many times the unprofiled one is mostly the profiler

MARK = "?"
UNSTEADY, FEW, NO_SPREAD = REASONS = ("not steady", "too few steps", "spread unknown")

# What a note, a verdict that is not given, and a tooltip say of each.
EXPLAINED = {
    UNSTEADY: f"step times varied by more than {STEADY:g}× within a row",
    FEW: f"fewer than {FEWEST_STEPS} steps were timed",
    NO_SPREAD: "the spread of the steps is not known",
}
ADVICE = {
    UNSTEADY: "Close other programs, or raise --steps",
    FEW: f"Measure with --steps {FEWEST_STEPS} or more",
    NO_SPREAD: f"Measure again with --steps {FEWEST_STEPS} or more",
}


def doubt_of_times(spread: tuple[float, float] | None, steps: int | None) -> str:
    """Return one of `REASONS`, or an empty string. `spread`: 10th and 90th percentile; `steps`: number timed."""
    if spread is None:
        return NO_SPREAD
    if steps is not None and steps < FEWEST_STEPS:
        return FEW
    return UNSTEADY if spread[1] > STEADY * spread[0] else ""


def marked(text: str, doubt: str) -> str:
    """Return a figure as it is shown: with a `?` where it is doubtful."""
    return text + MARK if doubt and text != MISSING else text


def explain(doubts: Iterable[str]) -> str:
    """Return `? marks figures of times that …`, or nothing if there is no doubt."""
    found = set(doubts)
    reasons = [EXPLAINED[reason] for reason in REASONS if reason in found]
    return f"{MARK} marks a figure of time that is doubtful: {'; '.join(reasons)}." if reasons else ""
