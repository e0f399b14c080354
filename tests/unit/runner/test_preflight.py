"""What is known of a model of dpscope's before its first row is started."""

from __future__ import annotations

import sys

import pytest
import torch

from dpscope.errors import UserError
from dpscope.runner.planning import require_buildable, require_measurable
from dpscope.workloads.configs import PRESETS, make_config


@pytest.mark.parametrize("method", ["standard", "flash"])
def test_a_model_is_looked_at_without_random_values_that_would_load_the_compiler(method, make_spec, monkeypatch):
    def compute(*_, **__):
        pytest.fail("a value was computed for a model without memory")

    monkeypatch.setattr(torch._refs, "normal_", compute)
    for initialiser in ("_no_grad_normal_", "_no_grad_uniform_"):
        monkeypatch.setattr(torch.nn.init, initialiser, compute)
    require_buildable(make_spec(method=method))


KNOWN = [name for name, preset in PRESETS.items() if preset.is_known_trainable]


def test_a_transformer_of_dpscopes_is_looked_at_without_torch(make_spec, monkeypatch):
    spec = make_spec(method="flash")
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would raise
    require_measurable([spec])


@pytest.mark.parametrize("name", KNOWN)
def test_a_model_that_is_known_to_be_trainable_is(name, make_spec):
    require_buildable(make_spec(workload=make_config(name), method="flash"))


@pytest.mark.parametrize("spec", [{"checkpoint_blocks": True}, {"workload": make_config("resnet18"), "seq_len": None}])
def test_what_a_config_does_not_tell_is_seen_by_building_the_model(spec, make_spec, monkeypatch):
    built = []
    monkeypatch.setattr("dpscope.runner.planning.require_buildable", built.append)
    require_measurable([made := make_spec(method="flash", **spec)])
    assert built == [made]


def test_a_model_larger_than_any_memory_is_refused(make_spec):
    config = make_config("tiny", hidden_dim=2**31 - 2, num_heads=2, vocab_size=2**31 - 1)
    with pytest.raises(UserError, match="is larger than any memory"):
        require_measurable([make_spec(workload=config)])
