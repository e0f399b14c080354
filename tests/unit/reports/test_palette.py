"""A method looks the same in every report, and like no other of its own report."""

from __future__ import annotations

import itertools

import pytest

from dpscope.reports.palette import (
    BUILT_IN_METHODS,
    COMPONENT_COLOURS,
    FAMILY_COLOURS,
    METHOD_COLOURS,
    METHOD_MARKERS,
    PHASE_COLOURS,
    method_looks,
)
from dpscope.vocabulary import components, families, phases


def method_colours(methods):
    return {method: look["colour"] for method, look in method_looks(methods).items()}


def method_markers(methods):
    return {method: look["marker"] for method, look in method_looks(methods).items()}


def method_colour(method):
    """Where there is no other to be told apart from."""
    return method_colours([method])[method]


# Of two other packages: the colour that the name alone would give them is the same.
ALIKE = next(
    pair
    for pair in itertools.combinations([f"method_{number}" for number in range(9)], 2)
    if method_colour(pair[0]) == method_colour(pair[1])
)


def test_a_built_in_method_keeps_its_colour_and_marker_whatever_else_is_there():
    for methods in (["flash"], ["standard", "flash"], ["theirs", "flash", "ghost"]):
        assert method_colours(methods)["flash"] == METHOD_COLOURS[BUILT_IN_METHODS.index("flash")]
        assert method_markers(methods)["flash"] == METHOD_MARKERS[BUILT_IN_METHODS.index("flash")]


def test_a_method_of_another_package_has_none_of_the_built_in_looks():
    assert method_colour("theirs") not in METHOD_COLOURS[: len(BUILT_IN_METHODS)]
    assert method_markers(["theirs"])["theirs"] not in METHOD_MARKERS[: len(BUILT_IN_METHODS)]


def test_two_methods_whose_names_ask_for_one_colour_get_two_whatever_their_order():
    one, other = ALIKE
    colours = method_colours([*BUILT_IN_METHODS, one, other])
    assert colours[one] == method_colour(one)
    assert len(set(colours.values())) == len(BUILT_IN_METHODS) + 2
    assert method_colours([other, one, *BUILT_IN_METHODS]) == colours


@pytest.mark.parametrize("looks", [method_colours, method_markers])
def test_as_many_methods_as_there_are_looks_are_all_told_apart(looks):
    count = {method_colours: len(METHOD_COLOURS), method_markers: len(METHOD_MARKERS)}[looks]
    methods = [f"theirs {number}" for number in range(count)]
    assert len(set(looks(methods).values())) == count
    assert len(looks([*methods, "one more"])) == count + 1


@pytest.mark.parametrize(
    ("names", "colours"),
    [
        (components.KEYS, COMPONENT_COLOURS),
        ((*phases.PHASES, phases.BETWEEN_PHASES), PHASE_COLOURS),
        (families.FAMILIES, FAMILY_COLOURS),
    ],
    ids=["components", "phases", "families"],
)
def test_everything_that_is_drawn_has_a_colour_of_its_own(names, colours):
    assert [name for name in names if name not in colours] == []
    assert len({colours[name] for name in names}) == len(names)
