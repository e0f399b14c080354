"""A private model that is spread over processes or devices afterwards is refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from dpscope.errors import UserError
from tests.torch_here import takes_shards
from tests.unit.flash.private_training import FEATURES, make_model, make_private, sgd


@pytest.fixture
def process_group() -> Iterator[None]:
    """One process over gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def two_processes() -> Iterator[None]:
    """What the first of two processes sees."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "FSDP": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "fully_shard": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))),
    "tensor parallel": lambda model: parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()}),
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=takes_shards if name == "fully_shard" else ()) for name in WRAPPERS]
)
def test_a_private_model_that_is_spread_afterwards_is_refused_at_the_first_batch(name: str) -> None:
    model, optimizer, loader = make_private(model := make_model(), sgd(model))
    x, y = next(iter(loader))
    with pytest.raises(UserError):
        spread = WRAPPERS[name](model)
        F.cross_entropy(spread(x), y).backward()
        optimizer.step()


def test_data_parallel_makes_no_replica_of_a_private_model() -> None:
    model, optimizer, _ = make_private(model := make_model(), sgd(model))
    with pytest.raises(UserError, match="DataParallel"):
        model._replicate_for_data_parallel()
    optimizer.engine.detach()
    model._replicate_for_data_parallel()


@pytest.mark.usefixtures("two_processes")
def test_a_model_is_not_made_private_in_one_of_two_processes() -> None:
    model = make_model()
    with pytest.raises(UserError, match="2 processes"):
        make_private(model, sgd(model))
    assert "forward" not in vars(model)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_step_in_one_of_two_processes_is_refused(wrapped: bool, request: pytest.FixtureRequest) -> None:
    """They would drift apart; torch.distributed may be initialised after make_private."""
    model, optimizer, _ = make_private(model := make_model(), sgd(model))
    request.getfixturevalue("two_processes")
    called = DifferentiallyPrivateDistributedDataParallel(model) if wrapped else model
    F.cross_entropy(called(torch.randn(4, FEATURES)), torch.zeros(4, dtype=torch.long)).backward()
    with pytest.raises(UserError, match="2 processes"):
        optimizer.step()


def test_one_process_of_one_is_no_hindrance(process_group: None) -> None:
    model, optimizer, loader = make_private(model := make_model(), sgd(model))
    x, y = next(iter(loader))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
