"""Sizes, a model and a refusal that tests of verification share."""

import pytest
import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine

B, T, D = 4, 4, 6  # as many positions as samples: what is told by sizes alone is told wrongly


def assert_refused(model, x, match):
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match=match):
        model(x)


class Counting(nn.Module):
    def __init__(self, *, of_samples: bool) -> None:
        super().__init__()
        self.layer, self.of_samples = nn.Linear(D, 3), of_samples
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += x.mean() if self.of_samples else 1
        return self.layer(x)
