"""A check knows the clipping rule that a method is asked for."""

from __future__ import annotations

import pytest

import dpscope
from dpscope.errors import UserError
from dpscope.trainers.flash import DPFlashClippingTrainer
from dpscope.vocabulary.settings import CLIPPING_RULES
from dpscope.workloads.configs import make_config
from dpscope.workloads.workload import build_workload

WORKLOAD = {"batch_size": 3, "seq_len": 8}


def tiny():
    return build_workload(make_config("tiny"), **WORKLOAD)


@pytest.mark.parametrize("rule", [rule for rule in CLIPPING_RULES if rule not in ("flat", "adaptive")])
def test_flash_follows_every_rule(rule: str) -> None:
    found = dpscope.check(tiny(), ["flash"], clipping=rule, neighbours=False)
    assert found.ok, str(found)


class AlwaysFlat(DPFlashClippingTrainer):
    def prepare_model(self, model):
        prepared = super().prepare_model(model)
        self.engine.clip.factors = lambda norms, bounds: (bounds / norms).clamp(max=1.0)
        return prepared


@pytest.mark.parametrize("rule", ["automatic", "psac"])
def test_a_method_that_clips_by_another_rule_is_not_exact(rule: str) -> None:
    found = dpscope.check(tiny(), [AlwaysFlat], clipping=rule, neighbours=False)
    assert not found.ok
    assert f"clipping={rule!r} gives another" in " ".join(str(found).split())


def test_a_bound_that_moves_is_not_checked() -> None:
    with pytest.raises(UserError, match="changes C from step to step"):
        dpscope.check(tiny(), ["flash"], clipping="adaptive")
