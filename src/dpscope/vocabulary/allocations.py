"""Declarations of what functions allocate and hold in local variables only, for the memory instrument.

    @allocates(GRADIENTS, "aten::mv")
    def sum_rows(...): ...

It is attached to the function, not to its name: a function may be renamed, moved or wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_components: dict[tuple[CodeType, str], str] = {}


def allocates(component: str, *operators: str) -> Callable[[F], F]:
    """Declare that calls of `operators` (`aten::mv`) by the function itself make `component`."""

    def declare(function: F) -> F:
        for operator in operators:
            _components[function.__code__, operator] = component
        return function

    return declare


def component_of(function: CodeType | None, operator: str) -> str | None:
    """Return the component that `function` declared for its calls of `operator`."""
    return None if function is None else _components.get((function, operator))
