"""torch's own functions on gradients, where a private model has none."""

import pytest
import torch
from torch import nn

from dpscope.flash import FlashEngine


def test_clipping_by_value_before_a_private_step_warns_and_changes_nothing():
    model = nn.Linear(4, 2)
    with FlashEngine(model) as engine:
        model(torch.randn(3, 4)).sum().backward()
        with pytest.warns(UserWarning, match="clip_grad_value_ found no gradients"):
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        engine.finish()
    before = model.weight.grad.clone()
    assert before.abs().max() > 1e-3
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    torch.testing.assert_close(model.weight.grad, before.clamp(-1e-3, 1e-3))
