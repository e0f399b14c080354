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
from dpscope.trainers.opacus import DPSGDTrainer
from dpscope.trainers.spreading import casts_by_itself, spread
from dpscope.vocabulary.settings import TrainerSettings


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


@pytest.mark.parametrize(("parallel", "kind"), [("fsdp", "FSDP2 (4,)"), ("hsdp", "HSDP (2, 2)")])
def test_blocks_are_sharded_one_by_one_and_then_the_rest(parallel: str, kind: str) -> None:
    sharded = spread(model(), settings(parallel))
    layout = layout_of(sharded)
    assert layout is not None
    assert layout.describe()[0] == kind
    assert [name for name, module in sharded.named_modules() if is_fsdp(module)] == ["", "0.0", "0.1"]


def test_under_ddp_the_model_is_wrapped_and_autocast_stays() -> None:
    assert isinstance(spread(model(), settings("ddp")), DistributedDataParallel)
    assert not casts_by_itself(settings("ddp", dtype="bf16"))
    assert casts_by_itself(settings("fsdp", dtype="bf16"))


def test_a_method_that_trains_in_one_process_says_so() -> None:
    with pytest.raises(UserError, match="trains in one process"):
        DPSGDTrainer(model(), lambda m, b: torch.zeros(1), settings("ddp"))
