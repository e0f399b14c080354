"""A model is spread as the settings say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from dpscope.errors import UserError
from dpscope.flash.ranks.layout import is_fsdp, layout_of
from dpscope.trainers.base import TrainerBase
from dpscope.trainers.flash import DPFlashClippingTrainer
from dpscope.trainers.modes import is_sharded, policy_of, spread
from dpscope.vocabulary.settings import TrainerSettings
from tests.torch_here import takes_shards
from tests.unit.flash.ranks.world import Model


@pytest.fixture(autouse=True)
def four_processes() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def model() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2))
    return nn.Sequential(nn.ModuleList(blocks), nn.Linear(4, 4))


def settings(parallel: str, **more: object) -> TrainerSettings:
    return TrainerSettings(batch_size=2, gpus=4, parallel=parallel, **more)


class OneProcess(TrainerBase):
    """A method that says nothing of several processes."""

    def prepare_model(self, model: nn.Module) -> nn.Module:
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def backward(self, losses: torch.Tensor) -> None: ...

    def update(self) -> None: ...


@takes_shards
@pytest.mark.parametrize(("parallel", "kind"), [("fsdp", "FSDP2 (4,)"), ("hsdp", "HSDP (2, 2)")])
def test_blocks_are_sharded_one_by_one_and_then_the_rest(parallel: str, kind: str) -> None:
    sharded = spread(model(), settings(parallel))
    layout = layout_of(sharded)
    assert layout is not None
    assert layout.describe()[0] == kind
    assert [name for name, module in sharded.named_modules() if is_fsdp(module)] == ["", "0.0", "0.1"]


def test_under_ddp_the_model_is_wrapped_and_autocast_stays() -> None:
    assert isinstance(spread(model(), settings("ddp")), DistributedDataParallel)
    assert not is_sharded(settings("ddp"))
    assert is_sharded(settings("fsdp"))


def test_bf16_is_the_policy_of_a_sharded_model_with_reduction_in_float32() -> None:
    half = policy_of(settings("fsdp", dtype="bf16"))
    assert (half.param_dtype, half.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert policy_of(settings("fsdp")).param_dtype is None


def test_a_method_that_trains_in_one_process_says_so() -> None:
    with pytest.raises(UserError, match="OneProcess trains in one process"):
        OneProcess(model(), lambda m, b: torch.zeros(1), settings("ddp"))


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=takes_shards)])
def test_a_memory_budget_decides_about_checkpointed_blocks_of_models_over_ranks(parallel: str) -> None:
    lean = settings(parallel, checkpoint_blocks=True, memory_budget="lean")
    trainer = DPFlashClippingTrainer(Model(), lambda m, ids: m(ids).sum(1), lean)
    for _ in range(2):
        trainer.train_step(torch.zeros(2, 5, dtype=torch.long))
    assert [block.how for block in trainer.engine.explain().blocks] == ["recomputed"] * 2
