"""Flash clipping as a method of a comparison."""

from __future__ import annotations

import pytest

from dpscope.errors import UserError
from dpscope.flash.gradients.memory_budget import LEAN
from dpscope.trainers.flash import memory_limit
from dpscope.vocabulary.settings import SETTINGS


@pytest.mark.parametrize(
    ("given", "written", "limit"),
    [("auto", "auto", None), ("lean", "lean", LEAN), ("24", "24", 24 * 2**30), (0.5, "0.5", 2**29)],
)
def test_a_memory_budget_is_a_word_or_a_number_of_gib(given, written, limit):
    checked = SETTINGS["memory_budget"].check(given)
    assert checked == written
    assert memory_limit(checked) == limit


@pytest.mark.parametrize("given", ["", "tight", "-1", "0", "nan", "inf", None, "24GB"])
def test_any_other_memory_budget_is_refused_in_a_sentence(given):
    with pytest.raises(UserError, match="memory budget"):
        SETTINGS["memory_budget"].check(given)
