"""A closed micro-batch hands its sums out in groups, which are small where copies are held beside a graph's memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpscope.flash import microbatch
from dpscope.flash.contributions import Outer
from dpscope.flash.microbatch import MicroBatch
from dpscope.flash.paths import GRAM, PathRules
from dpscope.flash.slots import Slot


@pytest.mark.parametrize(("copied", "sizes"), [(False, [3]), (True, [1, 1, 1])])
def test_sums_of_what_was_copied_come_in_smaller_groups(copied, sizes, monkeypatch):
    """Memory that is not torch's, numpy's here, stands for a CUDA graph's."""
    monkeypatch.setattr(microbatch, "GROUP_BYTES_OF_COPIES", 1)
    x, g = torch.randn(2, 6, 5), torch.randn(2, 6, 4)
    given = torch.from_numpy(g.numpy().copy()) if copied else g
    decision = PathRules(GRAM).of_product(x.shape, g)
    recorded = [
        (Slot(name, nn.Parameter(torch.zeros(4, 5)), "layer"), [Outer(x, given, decision)]) for name in ("a", "b", "c")
    ]
    micro = MicroBatch(recorded, rules=PathRules(GRAM), max_grad_norm=1e9, mean=False, loss_scale=1.0)
    batches = list(micro.sums(into=None, factored=True))
    assert [len(batch.parameters) for batch in batches] == sizes
    for batch in batches:
        for total in batch.tensors:
            torch.testing.assert_close(total, torch.einsum("btp,btd->pd", g, x))
