"""Checks of the exercises: `check("1.2", answer)` says whether an answer is right, and gives a hint if not.

The checks of lesson N are in `lesson_N.py`, one function for each exercise, built of asserts whose messages are hints.
The solutions are in `tutorials/solutions/lesson_N.py`.
"""

from __future__ import annotations

import importlib
from typing import Any

from language import say

TO_DO = ...  # what a stub returns, or holds, until the reader fills it in


def check(exercise: str, *answers: Any) -> bool:
    """Run the check of an exercise on the reader's answers and print the verdict.

    It never raises, so that a lesson runs from top to bottom whether its exercises are done or not.
    """
    lesson = importlib.import_module(f"checks.lesson_{exercise.partition('.')[0]}")
    verify = getattr(lesson, "exercise_" + exercise.replace(".", "_"))
    if any(answer is TO_DO for answer in answers):
        print(say(f"Exercise {exercise}: to do.", f"练习 {exercise}：还没有做。"))
        return False
    try:
        verify(*answers)
    except NotImplementedError:
        print(say(f"Exercise {exercise}: to do.", f"练习 {exercise}：还没有做。"))
        return False
    except AssertionError as hint:
        print(say(f"Exercise {exercise}: not yet. {hint}", f"练习 {exercise}：还不对。{hint}"))
        return False
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        print(say(f"Exercise {exercise}: your code raised {said}", f"练习 {exercise}：你的代码抛出了 {said}"))
        return False
    print(say(f"Exercise {exercise}: right.", f"练习 {exercise}：正确。"))
    return True


def near(value: Any, expected: float, share: float = 0.02) -> bool:
    """Tell whether a number is within a share of what is expected."""
    return isinstance(value, (int, float)) and abs(value - expected) <= share * abs(expected)
