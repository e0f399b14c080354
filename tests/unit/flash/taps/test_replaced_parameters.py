"""Parameters that are replaced after the engine was attached are refused by name."""

import pytest
import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine


def test_a_functional_call_is_refused_with_the_name_of_a_parameter():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    values = {name: 2 * parameter for name, parameter in model.named_parameters()}
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match=r"0\.weight was replaced"):
        torch.func.functional_call(model, values, (torch.randn(3, 4),))
