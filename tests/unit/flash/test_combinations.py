"""Combinations that are refused are one table, of which errors and the page are made."""

from __future__ import annotations

import re

import pytest
import torch

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from dpscope.flash.combinations import COMBINATIONS, as_markdown
from dpscope.flash.padding.rows import Rows, mark_batch
from tests import ROOT

PAGE = ROOT / "docs" / "flash-limits.md"


def test_the_page_has_the_table() -> None:
    """To write it: python -m tests.unit.flash.test_combinations."""
    inside = re.search(r"<!-- combinations: begin -->\n(.*)\n<!-- combinations: end -->", PAGE.read_text(), re.S)
    assert inside is not None
    assert inside[1] == as_markdown()


def test_every_combination_is_refused_somewhere_and_in_the_table_once() -> None:
    source = "".join(
        path.read_text() for path in (ROOT / "src/dpscope/flash").rglob("*.py") if path.name != "combinations.py"
    )
    named = set(re.findall(r"^([A-Z_]+) = Combination", (ROOT / "src/dpscope/flash/combinations.py").read_text(), re.M))
    assert len(named) > 10
    assert {name for name in named if f"{name}.error(" not in source} == set()
    assert len({(each.one, each.other) for each in COMBINATIONS}) == len(COMBINATIONS) == len(named) + 4


@pytest.mark.parametrize("each", COMBINATIONS, ids=lambda each: f"{each.one} with {each.other}")
def test_a_refusal_is_one_sentence_of_cause_and_one_of_remedy(each) -> None:
    assert len(each.why) + len(each.instead) <= 280
    fields = set(re.findall(r"{(\w+)", each.why))
    assert "{" not in str(each.error(**dict.fromkeys(fields, "x")))


def test_rows_of_a_padded_batch_are_not_grouped() -> None:
    model = torch.nn.Linear(3, 2)
    with FlashEngine(model) as engine:
        loss = model(mark_batch(torch.randn(4, 3), Rows(size=4, real=3))).sum()
        engine.group_rows(torch.tensor([0, 0, 1, 1]))
        with pytest.raises(UserError, match="group_rows and pad_batches do not go together"):
            loss.backward()


if __name__ == "__main__":
    text = PAGE.read_text()
    begin, end = "<!-- combinations: begin -->\n", "\n<!-- combinations: end -->"
    before, _, rest = text.partition(begin)
    PAGE.write_text(f"{before}{begin}{as_markdown()}\n<!-- combinations: end -->{rest.partition(end.strip())[2]}")
