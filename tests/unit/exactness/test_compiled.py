"""`check(compile=…)`: compiled methods are held against the eager reference; eager ones do not pass for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpscope.exactness.check import check
from dpscope.trainers.flash import DPFlashClippingTrainer
from dpscope.workloads.configs import make_config
from dpscope.workloads.workload import Workload, build_workload
from tests.compiled_here import aot_eager  # noqa: F401
from tests.made_up import TINY_SIZES
from tests.torch_here import takes_compiled

pytestmark = [takes_compiled, pytest.mark.usefixtures("aot_eager")]


def layers(model=lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3)), call=None):
    def batch(seed, device):
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))

    return Workload(model=model, batch=batch, loss=call or (lambda model, x: model(x).square().mean(1)))


def verdict(workload, method, **options):
    (found,) = check(workload, [method], neighbours=False, **options).methods
    return found


class WrongWhenCompiled(DPFlashClippingTrainer):
    def backward(self, losses):
        super().backward(losses * (2 if self.settings.compile != "none" else 1))


@pytest.mark.parametrize("options", [{}, {"checkpoint_blocks": True}, {"accumulate": 2}], ids=str)
def test_compiled_flash_is_exact_on_a_transformer(options):
    config = make_config("tiny", **TINY_SIZES)
    found = verdict(build_workload(config, batch_size=4, seq_len=8), "flash", compile="default", **options)
    assert found.verdict == "exact", found
    assert max(error for step in found.steps for error in step.parameter_errors.values()) < 1e-5


def test_a_method_that_is_wrong_only_on_a_compiled_model_is_found_out():
    assert verdict(layers(), WrongWhenCompiled).verdict == "exact"
    assert verdict(layers(), WrongWhenCompiled, compile="default").verdict == "NOT EXACT"


def test_a_method_that_ran_eager_is_not_called_exact():
    class Whole(nn.Linear):
        def apply_to(self, x):
            return nn.functional.linear(x, self.weight, self.bias)

    found = verdict(
        layers(lambda: Whole(6, 3), lambda model, x: model.apply_to(x).square().mean(1)), "flash", compile="default"
    )
    assert found.verdict in ("skipped", "failed"), found


def test_opacus_is_skipped_with_its_reason():
    found = verdict(layers(), "ghost", compile="default")
    assert found.verdict == "skipped"
    assert "opacus/issues/575" in found.reason
