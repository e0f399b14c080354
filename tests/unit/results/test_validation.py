"""What is read from a file is of the declared type, or the place that is not is named."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from typing_extensions import NotRequired, TypedDict

from dpscope.results.schema import find_mismatch


class Part(TypedDict):
    name: str
    count: NotRequired[int]


class Whole(TypedDict):
    parts: list[Part]
    by_name: dict[str, float]
    peak: Part | None
    pair: NotRequired[tuple[str, int]]
    kind: NotRequired[Literal["a", "b"]]
    steps: NotRequired[list[float]]
    anything: NotRequired[Any]


INTACT = {
    "parts": [{"name": "x", "count": 3}, {"name": "y"}],
    "by_name": {"z": 1.5},
    "peak": None,
    "pair": ["p", 1],
    "kind": "a",
    "steps": [1, 2.5],
}


def test_what_is_as_declared_has_no_mismatch():
    assert find_mismatch(INTACT, Whole) is None
    assert find_mismatch({**INTACT, "anything": object(), "of a later version": 3}, Whole) is None
    assert find_mismatch({**INTACT, "by_name": {"whole": 2}, "peak": {"name": "n"}}, Whole) is None


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ({"parts": [{"name": "x"}, {"name": 3}]}, "parts[1].name: text expected, not 3"),
        ({"parts": [{"count": 1}]}, "parts[0] has no 'name'"),
        ({"parts": {}}, "parts: a list expected, not an object"),
        ({"parts": ["x"]}, "parts[0]: an object expected, not 'x'"),
        ({"parts": [{"name": "x", "count": True}]}, "parts[0].count: a whole number expected, not True"),
        ({"parts": [{"name": "x", "count": 1.5}]}, "parts[0].count: a whole number expected, not 1.5"),
        ({"by_name": {"z": "1"}}, "by_name.z: a number expected, not '1'"),
        ({"by_name": {"z": float("nan")}}, "by_name.z: a number expected, not nan"),
        ({"by_name": {"z": 1e308}}, "by_name.z: a number expected, not 1e+308"),
        ({"steps": [1.0, float("nan")]}, "steps[1]: a number expected, not nan"),
        ({"steps": [1.0, True]}, "steps[1]: a number expected, not True"),
        ({"steps": [1, 10**301]}, "steps[1]: a number expected, not 1000000000000000000000000000000000000000"),
        ({"peak": []}, "peak: an object expected, not a list"),
        ({"pair": ["p"]}, "pair: a list of 2 expected, not a list"),
        ({"pair": ["p", "q"]}, "pair[1]: a whole number expected, not 'q'"),
        ({"kind": "c"}, "kind: 'a' or 'b' expected, not 'c'"),
        ({"by_name": None}, "by_name: an object expected, not nothing"),
    ],
)
def test_the_first_place_that_is_not_as_declared_is_named(damage, sentence):
    assert find_mismatch({**INTACT, **damage}, Whole) == sentence


def test_what_is_no_object_at_all_is_said():
    assert find_mismatch([], Whole) == "it: an object expected, not a list"
