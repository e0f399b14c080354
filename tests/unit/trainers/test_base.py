"""What all trainers share."""

from __future__ import annotations

import pytest
import torch

from dpscope.trainers.base import fastest_options
from dpscope.vocabulary.settings import OPTIMIZERS


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_the_list_takes_the_fused_option_on_cuda(name):
    optimizer = getattr(torch.optim, OPTIMIZERS[name])
    assert fastest_options(optimizer, "cuda") == {"fused": True}
    assert fastest_options(optimizer, "cpu") == {}


def test_an_optimizer_without_a_fused_implementation_is_made_without_the_option():
    assert fastest_options(torch.optim.RMSprop, "cuda") == {}
