"""Names in sentences."""

from __future__ import annotations

import pytest

from dpscope.reports.looks import LONGEST_IN_PROSE, in_prose

KERNEL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(int)"
)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("aten::bmm", "aten::bmm"),
        ("autograd::engine::evaluate_function: AddmmBackward0", "autograd: AddmmBackward0"),
        (KERNEL, "void at::native::vectorized_elementwise_kernel"),
        ("a" * 300, "a" * 300),
        ("word " * 40, ("word " * 40)[:LONGEST_IN_PROSE].rsplit(" ", 1)[0].rstrip() + " …"),
    ],
)
def test_a_name_is_whole_or_ends_between_words(name, told):
    assert in_prose(name) == told
