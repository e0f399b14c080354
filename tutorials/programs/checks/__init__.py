"""Checks of the exercises: `check("1.2", answer)` says whether an answer is right, and gives a hint if not.

The checks of lesson N are in `lesson_N.py`, one function for each exercise, built of asserts whose messages are hints.
The solutions are in `tutorials/solutions/lesson_N.py`.
"""

from __future__ import annotations

import importlib
from typing import Any

from language import say


def check(exercise: str, *answers: Any) -> None:
    """Check the answers to an exercise and print the verdict."""
    passed(exercise, *answers)


def passed(exercise: str, *answers: Any) -> bool:
    """Check the answers to an exercise, print the verdict, and return it.

    It never raises, so that a lesson runs from top to bottom whether its exercises are done or not.
    """
    lesson = importlib.import_module(f"checks.lesson_{exercise.partition('.')[0]}")
    verify = getattr(lesson, "exercise_" + exercise.replace(".", "_"))
    if any(is_to_do(answer) for answer in answers):
        print(
            say(
                f"Exercise {exercise}: to do. Replace the `...` above.",
                f"练习 {exercise}：还没有做。请替换上面的 `...`。",
            )
        )
        return False
    try:
        verify(*answers)
    except AssertionError as hint:
        print(say(f"Exercise {exercise}: not yet. {hint}", f"练习 {exercise}：还不对。{hint}"))
        return False
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        print(say(f"Exercise {exercise}: your code raised {said}", f"练习 {exercise}：你的代码抛出了 {said}"))
        return False
    print(say(f"Exercise {exercise}: right.", f"练习 {exercise}：正确。"))
    return True


def _stub() -> None: ...


def is_to_do(answer: Any) -> bool:
    """Tell whether an answer is still the stub: `...`, something that holds it, or a function of nothing else."""
    if isinstance(answer, dict):
        return any(is_to_do(value) for value in answer.values())
    return answer is ... or getattr(getattr(answer, "__code__", None), "co_code", None) == _stub.__code__.co_code


def near(value: Any, expected: float, share: float = 0.02) -> bool:
    """Tell whether a number is within a share of what is expected."""
    return isinstance(value, (int, float)) and abs(value - expected) <= share * abs(expected)
