"""What is known of a model of dpscope's before its first row is started."""

from __future__ import annotations

import pytest
import torch

from dpscope.errors import UserError
from dpscope.runner.preflight import require_measurable
from dpscope.workloads.configs import make_config


@pytest.mark.parametrize("method", ["standard", "flash"])
def test_a_model_is_looked_at_without_random_values_that_would_load_the_compiler(method, make_spec, monkeypatch):
    def compute(*_, **__):
        pytest.fail("a value was computed for a model without memory")

    monkeypatch.setattr(torch._refs, "normal_", compute)
    for initialiser in ("_no_grad_normal_", "_no_grad_uniform_"):
        monkeypatch.setattr(torch.nn.init, initialiser, compute)
    require_measurable([make_spec(method=method)])


def test_a_model_larger_than_any_memory_is_refused(make_spec):
    config = make_config("tiny", hidden_dim=2**31 - 2, num_heads=2, vocab_size=2**31 - 1)
    with pytest.raises(UserError, match="is larger than any memory"):
        require_measurable([make_spec(workload=config)])
