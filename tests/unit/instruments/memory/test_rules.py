"""Component rules of one's own, the documented example first."""

from __future__ import annotations

import re

import pytest

from dpscope.errors import UserError
from tests import ROOT
from tests.unit.instruments.memory.steps import tracked_step, trainer_of

PAGE = ROOT / "docs" / "memory.md"


@pytest.fixture(scope="module")
def documented():
    """The rule of docs/memory.md, as a reader would copy it."""
    (code,) = re.findall(r"```python\n# attention_rule.py\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    return names["attention"]


def test_the_documented_rule_tells_attention_apart(documented):
    trainer, batch = trainer_of("standard")
    plain = tracked_step(*trainer_of("standard"))
    use = tracked_step(trainer, batch, rules=[documented])
    assert use.components == (*plain.components, "attention")
    attention, activations = (use.components.index(key) for key in ("attention", "activations"))
    # At the end of forward: of each of 2 layers the output (B, T, d) and the logsumexp (B, heads, T).
    each = 3 * 24 * 32 * 4 + 3 * 2 * 24 * 4
    end = use.record.start + next(p["end"] for p in use.phases() if p["name"] == "forward") - 1
    assert use.points[end][attention] == 2 * each
    # What a rule does not name stays where it was, and the sum stays what it was.
    assert use.totals == plain.totals
    assert plain.points[end][activations] - use.points[end][activations] == 2 * each


def test_a_rules_word_is_final_also_over_an_owner():
    use = tracked_step(
        *trainer_of("standard"),
        rules=[lambda birth: "embedding_gradients" if birth.operator == "aten::embedding_dense_backward" else None],
    )
    place = use.components.index("embedding_gradients")
    assert use.points[-1][place] == (101 + 64) * 32 * 4  # both tables, that of positions too
    weights = use.points[-1][use.components.index("model_parameters")]
    assert use.points[-1][use.components.index("gradients")] == weights - use.points[-1][place]


def test_a_rule_is_not_asked_about_what_was_there_before():
    asked = []
    tracked_step(*trainer_of("standard"), rules=[asked.append])
    assert asked
    assert all(birth.operator for birth in asked)


def test_the_first_rule_that_has_a_word_has_it():
    use = tracked_step(*trainer_of("standard"), rules=[lambda birth: "mine", lambda birth: "yours"])
    assert "mine" in use.components
    assert "yours" not in use.components


@pytest.mark.parametrize("answer", ["", "two words", 3, True, "unattributed"])
def test_a_rule_that_answers_nonsense_is_told_what_to_answer(answer):
    with pytest.raises(UserError, match="return None, one of model_parameters"):
        tracked_step(*trainer_of("standard"), rules=[lambda birth: answer])
