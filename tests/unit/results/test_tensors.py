"""A tensor at the peak in words: its shape, what made it, and where."""

from __future__ import annotations

import pytest

from dpscope.results.derived import maker_of, place_of, shape_in_words

TENSOR = {
    **{"shape": [8, 1024], "dtype": "float32", "module": "blocks.*.up", "operator": "aten::addmm"},
    **{"line": "src/model.py:12 forward", "by_autograd": False},
}


@pytest.mark.parametrize(
    ("about", "whole", "short"),
    [
        ({}, "src/model.py:12 forward", "model.py:12"),
        ({"by_autograd": True}, "backward of src/model.py:12 forward", "model.py:12, backward"),
        ({"line": "", "by_autograd": True}, "autograd", "autograd"),
        ({"line": ""}, "—", "—"),
        ({"operator": ""}, "before the step", "before the step"),
    ],
)
def test_its_place_is_a_line_of_code_or_says_why_there_is_none(about, whole, short):
    assert (place_of(TENSOR | about), place_of(TENSOR | about, short=True)) == (whole, short)


@pytest.mark.parametrize(
    ("about", "maker"),
    [
        ({}, "blocks.*.up · addmm"),
        ({"operator": ""}, "blocks.*.up"),
        ({"module": ""}, "addmm"),
        ({"module": "", "operator": ""}, "—"),
    ],
)
def test_its_maker_is_as_much_as_is_known_of_module_and_operator(about, maker):
    assert maker_of(TENSOR | about) == maker


def test_a_tensor_without_dimensions_is_a_scalar():
    assert shape_in_words(TENSOR) == "8×1024 float32"
    assert shape_in_words(TENSOR | {"shape": []}) == "scalar float32"
