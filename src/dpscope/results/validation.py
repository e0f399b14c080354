"""Validation of values that were read from JSON against their declared types.

Types are those that JSON can hold: `TypedDict`, `list[X]`, `dict[str, X]`, `tuple[X, Y]`, `X | None`, `Literal`, `str`,
`bool`, `int`, `float` and `Any`. Keys that are not declared are left alone: a later version may have written them.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from typing_extensions import NotRequired, get_type_hints, is_typeddict

LARGEST_INT = 2**63
LARGEST_FLOAT = 1e300  # figures are multiplied with each other
OPTIONAL_KEY: Any = NotRequired
_NUMBERS: dict[Any, tuple[tuple[type, ...], float]] = {int: ((int,), LARGEST_INT), float: ((int, float), LARGEST_FLOAT)}
_WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
_WORDS |= {list: "a list", dict: "an object", type(None): "nothing"}


def find_mismatch(value: object, expected: Any, where: str = "") -> str | None:
    """Return `peak.phase: text expected, not 3` for the first place that is not as declared; None if all is."""
    return next(_mismatches(value, expected, where), None)


def _mismatches(value: object, expected: Any, where: str) -> Iterator[str]:
    origin, arguments, is_object = _take_apart(expected)
    if origin in (Union, types.UnionType):
        found = [find_mismatch(value, choice, where) for choice in arguments if choice is not type(None)]
        if value is not None or type(None) not in arguments:
            yield from found[:1] if None not in found else ()  # type: ignore[misc]
    elif is_object and isinstance(value, dict):
        yield from _in_object(value, expected, where)
    elif origin is list and isinstance(value, list):
        if not _all_numbers(value, arguments[0]):
            yield from _in_each(value, [arguments[0]] * len(value), where)
    elif origin is tuple and isinstance(value, list) and len(value) == len(arguments):
        yield from _in_each(value, arguments, where)
    elif origin is dict and isinstance(value, dict):
        for name, item in value.items():
            yield from _mismatches(item, arguments[1], _below(where, name))
    elif not _is_plain(value, expected):
        yield f"{where or 'it'}: {_describe(expected)} expected, not {_show(value)}"


@cache
def _take_apart(expected: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Return origin and arguments of a type, and whether it is a `TypedDict`; cached, because values are many."""
    return get_origin(expected), get_args(expected), is_typeddict(expected)


def _in_each(values: list[Any], expected: Any, where: str) -> Iterator[str]:
    for index, (item, kind) in enumerate(zip(values, expected, strict=True)):
        yield from _mismatches(item, kind, f"{where}[{index}]")


def _all_numbers(values: list[Any], kind: Any) -> bool:
    """Return whether a long list holds only finite numbers, by summing it: the sum is NaN if one of them is."""
    allowed, largest = _NUMBERS.get(kind, ((), 0))
    return set(map(type, values)).issubset(allowed) and sum(map(abs, values)) < largest


def _in_object(value: dict[str, Any], expected: Any, where: str) -> Iterator[str]:
    for name, (kind, required) in _fields(expected).items():
        if name in value:
            yield from _mismatches(value[name], kind, _below(where, name))
        elif required:
            yield f"{where or 'the object'} has no {name!r}"


@cache
def _fields(expected: Any) -> dict[str, tuple[Any, bool]]:
    """Map names to (type, is required). `__required_keys__` is wrong if annotations are postponed."""
    hints = get_type_hints(expected, include_extras=True)
    optional = {name for name, kind in hints.items() if get_origin(kind) is OPTIONAL_KEY}
    return {
        name: (get_args(kind)[0] if name in optional else kind, expected.__total__ and name not in optional)
        for name, kind in hints.items()
    }


def _is_plain(value: object, expected: Any) -> bool:
    if expected is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_FLOAT
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST_INT
    origin, arguments, _ = _take_apart(expected)
    if origin is Literal:
        return value in arguments
    return expected is Any or (expected in (str, bool) and isinstance(value, expected))


def _below(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _describe(expected: Any) -> str:
    origin, arguments, is_object = _take_apart(expected)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        return f"a list of {len(arguments)}"
    return _WORDS[dict if is_object else origin or expected]


def _show(value: object) -> str:
    return _WORDS[type(value)] if value is None or isinstance(value, list | dict) else repr(value)[:40]
