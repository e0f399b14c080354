"""A method looks the same in every report, and like no other of its own report."""

from __future__ import annotations

import itertools

import pytest

from dpscope.reports.looks import (
    BUILT_IN_METHODS,
    COMPONENT_COLOURS,
    FAMILY_COLOURS,
    METHOD_COLOURS,
    METHOD_MARKERS,
    PHASE_COLOURS,
    colour_of,
    method_looks,
)
from dpscope.vocabulary import components, phases


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
        (phases.FAMILIES, FAMILY_COLOURS),
    ],
    ids=["components", "phases", "families"],
)
def test_everything_that_is_drawn_has_a_colour_of_its_own(names, colours):
    assert [name for name in names if name not in colours] == []
    assert len({colours[name] for name in names}) == len(names)


def _seen_with(weights, colour):
    """A colour's light as an eye sees it that lacks a kind of cone (Viénot, Brettel and Mollon 1999), gamma 2.2."""
    red, green, blue = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    light = [level**2.2 for level in (red, green, blue)]
    return [sum(w * part for w, part in zip(row, light, strict=True)) for row in weights]


EYES = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red cones": [[0.1124, 0.8876, 0.0], [0.1124, 0.8876, 0.0], [0.004, -0.004, 1.0]],
    "no green cones": [[0.2928, 0.7072, 0.0], [0.2928, 0.7072, 0.0], [-0.0223, 0.0223, 1.0]],
}


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("colours", [COMPONENT_COLOURS.values(), METHOD_COLOURS], ids=["components", "methods"])
def test_no_two_colours_look_alike_to_any_eye(colours, eye):
    """Two levels out of 255 of gamma-corrected light would be one colour; these are at least ten apart."""
    seen = [[max(level, 0.0) ** (1 / 2.2) * 255 for level in _seen_with(EYES[eye], colour)] for colour in colours]
    for one, other in itertools.combinations(seen, 2):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 10


def test_a_users_own_component_has_one_colour_and_none_of_the_known():
    assert colour_of("my_cache") == colour_of("my_cache")
    assert colour_of("my_cache") not in COMPONENT_COLOURS.values()
