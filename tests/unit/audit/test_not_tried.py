"""What could not be tried has a reason; a loop that was described wrongly is a user's mistake."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import dpscope
from dpscope.errors import UserError
from tests.unit.audit import planted_loops
from tests.unit.audit.planted_loops import ByHand, make_batches


def check(make_loop, **options):
    return dpscope.check_loop(make_loop, make_batches(), **options)


def by_hand(cls=ByHand, **changes):
    """A maker of loops of this class, with parts of the loop replaced."""

    def make_loop(**settings):
        loop = cls(**settings).loop()
        return dpscope.Loop(**{**vars(loop), **changes})

    return make_loop


def test_a_loop_without_accountant_and_checkpoints_says_what_was_not_tried():
    found = check(by_hand(accountant=None, save=None))
    assert found.ok and found.accounting.verdict == "not tried"
    assert found.accounting.untried == ["it keeps no accountant that can be asked"]
    assert "resumed runs: the loop does not say how to save and resume" in found.noise.untried
    assert str(found).splitlines()[-1] == "the loop: neighbours, noise held."


class SmallStep(ByHand):
    """An ordinary learning rate: updates are lost in the rounding of the parameters."""

    def step(self, batch):
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        super().step(batch)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(before[name] + (p - before[name]) * (1e-4 / planted_loops.LEARNING_RATE))


def test_updates_that_are_lost_in_rounding_are_not_judged():
    found = check(by_hand(SmallStep, scale=1e-4 / planted_loops.EXPECTED))
    assert not found.breached, str(found)
    assert any("take a larger learning rate" in reason for reason in found.neighbours.untried)


def with_optimizer(make_optimizer):
    class WithOptimizer(ByHand):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.optimizer = make_optimizer(self.model.parameters())

        def step(self, batch):
            sums, noise = self.sums(batch), self.noise(batch)
            for name, p in self.model.named_parameters():
                p.grad = (sums[name] + noise[name]) / planted_loops.EXPECTED
            self.optimizer.step()
            self.account(batch)

    return by_hand(WithOptimizer)


OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=planted_loops.LEARNING_RATE, momentum=0.9),
    "as Adam does": lambda parameters: torch.optim.Adam(parameters, lr=planted_loops.LEARNING_RATE),
}


@pytest.mark.parametrize("sentence", OPTIMIZERS)
def test_an_optimizer_from_whose_updates_no_sum_can_be_read_is_told(sentence):
    found = check(with_optimizer(OPTIMIZERS[sentence]))
    assert [finding.verdict for _, finding in found.findings()] == ["not tried"] * 3
    assert sentence in found.neighbours.untried[0] and not found.ok


def test_plain_sgd_of_torch_holds():
    assert check(with_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=planted_loops.LEARNING_RATE))).ok


class RefusesFive(ByHand):
    def step(self, batch):
        if len(batch["x"]) == 5:
            raise UserError("five is a number of positions")
        super().step(batch)


def test_a_batch_size_that_is_refused_is_named_with_the_reason_and_the_rest_is_tried():
    found = check(by_hand(RefusesFive))
    assert found.ok
    assert found.neighbours.untried == ["batches of 5: five is a number of positions"]


class RefusesEmpty(ByHand):
    def step(self, batch):
        if not len(batch["x"]):
            raise IndexError("nobody was drawn")
        super().step(batch)


def test_a_loop_that_refuses_empty_batches_is_tried_without_them():
    found = check(by_hand(RefusesEmpty))
    assert found.ok and found.accounting.trials == 4
    for finding in (found.neighbours, found.noise, found.accounting):
        assert any(reason == "an empty batch: IndexError: nobody was drawn" for reason in finding.untried)


class Broken(ByHand):
    def step(self, batch):
        raise KeyError("no such column")


def test_a_loop_that_cannot_step_at_all_is_not_tried():
    found = check(by_hand(Broken))
    assert not found.ok and not found.breached
    assert found.neighbours.untried == ["KeyError: 'no such column'"]


@pytest.mark.parametrize(
    ("make_loop", "options", "sentence"),
    [
        (lambda **settings: (nn.Linear(1, 1), print), {}, "has to return a dpscope.Loop, not tuple"),
        (by_hand(scale=0.0), {}, "learning rate / the expected batch size"),
        (by_hand(), {"noise_multiplier": 0.0}, "noise multiplier must be a number above 0"),
        (by_hand(), {"sizes": [0]}, "--sizes must be a whole number of at least 1"),
    ],
)
def test_a_loop_described_wrongly_is_a_users_mistake(make_loop, options, sentence):
    with pytest.raises(UserError, match=sentence):
        check(make_loop, **options)


def test_no_batches_are_a_users_mistake():
    with pytest.raises(UserError, match="no batch was given"):
        dpscope.check_loop(by_hand(), [])


def test_the_answer_is_machine_readable():
    found = json.loads(check(by_hand(planted_loops.SkipsEmptyBatches)).to_json())
    assert found["ok"] is False and found["accounting"]["verdict"] == "BREACH"
    assert found["accounting"]["figures"] == {"steps_taken": 6.0, "steps_counted": 4.0}
    assert found["neighbours"]["verdict"] == "held" and found["neighbours"]["trials"] >= 25
