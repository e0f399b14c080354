"""A closed micro-batch hands its sums out in groups: what is kept first, and few at a time where memory is short."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpscope.flash.gradients.clip_rules import ClipRule
from dpscope.flash.gradients.contributions import Kept, Outer
from dpscope.flash.gradients.memory_budget import Allocated, MemoryBudget
from dpscope.flash.gradients.paths import GRAM, PathRules
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.step import microbatch
from dpscope.flash.step.microbatch import MicroBatch


@pytest.mark.parametrize(("copied", "sizes"), [(False, [3]), (True, [1, 1, 1])])
def test_sums_of_what_was_copied_come_in_smaller_groups(copied, sizes, monkeypatch):
    """Memory that is not torch's, numpy's here, stands for a CUDA graph's."""
    monkeypatch.setattr(microbatch, "LEAST_GROUP_BYTES", 1)
    x, g = torch.randn(2, 6, 5), torch.randn(2, 6, 4)
    given = torch.from_numpy(g.numpy().copy()) if copied else g
    decision = PathRules(GRAM).of_product(x.shape, g)
    recorded = [
        (Slot(name, nn.Parameter(torch.zeros(4, 5)), "layer"), [Outer(x, given, decision)]) for name in ("a", "b", "c")
    ]
    micro = MicroBatch(recorded, rules=PathRules(GRAM), clip=ClipRule(1e9), mean=False, loss_scale=1.0)
    batches = list(micro.sums(into=None, factored=True))
    assert [len(batch.parameters) for batch in batches] == sizes
    for batch in batches:
        for total in batch.tensors:
            torch.testing.assert_close(total, torch.einsum("btp,btd->pd", g, x))


def micro_batch_of_products(kept: int, held: int, rules: PathRules) -> MicroBatch:
    """Products of two samples, (4, 5) each: the first ones held as x and g, the last ones kept."""
    x, g = torch.randn(2, 6, 5), torch.randn(2, 6, 4)
    decision = rules.of_product(x.shape, g)
    parts = [Outer(x, g, decision) for _ in range(held)] + [Kept(torch.randn(2, 4, 5)) for _ in range(kept)]
    recorded = [(Slot(str(n), nn.Parameter(torch.zeros(4, 5)), "layer"), [part]) for n, part in enumerate(parts)]
    return MicroBatch(recorded, rules=rules, clip=ClipRule(1e9), mean=False, loss_scale=1.0)


def test_what_is_kept_is_handed_out_first_for_it_leaves_most_memory():
    micro = micro_batch_of_products(kept=2, held=3, rules=PathRules(GRAM))
    found = [(len(batch.parameters), batch.factors is not None) for batch in micro.sums(into=None, factored=True)]
    assert found == [(2, True), (3, False)]


@pytest.mark.parametrize(
    ("room", "kept", "sizes"), [(400, 0, [3]), (79, 0, [1, 1, 1]), (79, 2, [3]), (-1e9, 0, [1, 1, 1])]
)
def test_few_sums_are_made_at_once_where_they_would_raise_the_peak(room, kept, sizes, monkeypatch):
    """A sum of 80 bytes each; what is kept, 160 bytes each, makes room before they come."""
    monkeypatch.setattr(microbatch, "LEAST_GROUP_BYTES", 1)
    budget = MemoryBudget(1000, (), lambda: Allocated(int(1000 - room), 0))
    budget.begin_forward()
    budget.begin_backward()
    micro = micro_batch_of_products(kept, 3, PathRules(GRAM, budget))
    groups = [len(batch.parameters) for batch in micro.sums(into=None, factored=True) if batch.factors is None]
    assert groups == sizes


def test_factors_that_are_given_make_sums_without_norms(monkeypatch):
    monkeypatch.setattr(microbatch, "SquaredNorms", None)
    x, g, each = torch.randn(2, 6, 5), torch.randn(2, 6, 4), torch.randn(2, 4, 5)
    rules, weights = PathRules(GRAM), torch.tensor([-3.0, 0.5], dtype=torch.float64)
    parts = [Outer(x, g, rules.of_product(x.shape, g)), Kept(each)]
    recorded = [(Slot(str(n), nn.Parameter(torch.zeros(4, 5)), "layer"), [part]) for n, part in enumerate(parts)]
    micro = MicroBatch(recorded, rules=rules, clip=ClipRule(), mean=False, loss_scale=1.0, weights=weights)
    kept, product = (total for batch in micro.sums(into=None, factored=False) for total in batch.tensors)
    torch.testing.assert_close(kept, torch.einsum("b,bpd->pd", weights.float(), each))
    torch.testing.assert_close(product, torch.einsum("b,btp,btd->pd", weights.float(), g, x))
