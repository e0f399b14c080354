"""How a model is spread is told from the model; what cannot be trained is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from dpscope.errors import UserError
from dpscope.flash import FlashEngine, PrivacyEngine
from dpscope.flash.ranks.layout import layout_of
from tests.torch_here import takes_shards
from tests.unit.flash.private_training import make_model, make_private, sgd

Spread = Callable[[nn.Module], nn.Module]


@pytest.fixture(autouse=True)
def four_processes() -> Iterator[None]:
    """What the first of four processes sees."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def mesh(*names: str) -> Any:
    return init_device_mesh("cpu", (4,) if len(names) == 1 else (2, 2), mesh_dim_names=names)


def shard(model: nn.Module, **options: Any) -> nn.Module:
    return fully_shard(model, **{"mesh": mesh("dp"), **options})


def tensor_parallel(model: nn.Module) -> nn.Module:
    return parallelize_module(model, init_device_mesh("cpu", (4,)), {"0": ColwiseParallel()})


def sharded_and_wrapped(model: nn.Module) -> nn.Module:
    wrapper = DistributedDataParallel(model)
    shard(model)
    return wrapper


ACCEPTED: dict[str, tuple[Spread, str]] = {
    "DDP": (DistributedDataParallel, "DDP"),
    "DDP with unused parameters": (lambda m: DistributedDataParallel(m, find_unused_parameters=True), "DDP"),
    "Opacus's DDP": (DifferentiallyPrivateDistributedDataParallel, "DDP"),
    "FSDP2": (shard, "FSDP2 (4,)"),
    "compiled FSDP2": (lambda m: torch.compile(shard(m)), "FSDP2 (4,)"),
    "compiled DDP": (lambda m: torch.compile(DistributedDataParallel(m)), "DDP"),
    "HSDP": (lambda m: shard(m, mesh=mesh("replicate", "shard")), "HSDP (2, 2)"),
    "one layer sharded": (lambda m: nn.Sequential(shard(m[0]), *m[1:]), "FSDP2 (4,)"),
}

REFUSED: dict[str, tuple[Spread, str]] = {
    "DataParallel": (nn.DataParallel, "DataParallel"),
    "FSDP1": (lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu")), "FSDP1"),
    "tensor parallel": (tensor_parallel, "tensor parallelism"),
    "tensor parallel under FSDP2": (
        lambda m: fully_shard(
            parallelize_module(m, mesh("dp", "tp")["tp"], {"0": ColwiseParallel()}), mesh=mesh("dp", "tp")["dp"]
        ),
        "tensor parallelism",
    ),
    "part of the world": (lambda m: shard(m, mesh=mesh("dp", "tp")["dp"]), "2 of 4 processes"),
    "context parallel": (lambda m: shard(m, mesh=mesh("dp_shard_cp")), "context parallelism"),
    "another dimension": (lambda m: shard(m[0], shard_placement_fn=lambda p: Shard(p.ndim - 1)), "shard_placement_fn"),
    "two meshes": (
        lambda m: nn.Sequential(shard(m[0]), shard(m[3], mesh=mesh("replicate", "shard"))),
        "two different meshes",
    ),
    "static graph": (lambda m: DistributedDataParallel(m, static_graph=True), "static_graph"),
    "DDP inside": (lambda m: nn.Sequential(DistributedDataParallel(m), nn.Flatten()), "wrap the whole model"),
    "sharded inside DDP": (sharded_and_wrapped, "one of them"),
}

# An older torch refuses what fully_shard has sharded by its release.
BY_FULLY_SHARD = {
    "FSDP2",
    "HSDP",
    "compiled FSDP2",
    "one layer sharded",
    "tensor parallel under FSDP2",
    "part of the world",
}
BY_FULLY_SHARD |= {"context parallel", "another dimension", "two meshes"}


def marked(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=takes_shards if name in BY_FULLY_SHARD else ()) for name in names]


@pytest.mark.parametrize("name", marked(ACCEPTED))
def test_a_model_is_spread_as_it_was_wrapped(name: str) -> None:
    wrap, kind = ACCEPTED[name]
    layout = layout_of(wrap(make_model()))
    assert layout is not None
    assert layout.describe()[0] == kind


@pytest.mark.parametrize("name", marked(REFUSED))
def test_what_cannot_be_trained_is_refused_by_name(name: str) -> None:
    wrap, words = REFUSED[name]
    model = wrap(make_model())
    with pytest.raises(UserError, match=words):
        make_private(model, sgd(model))
    with pytest.raises(UserError, match=words):
        FlashEngine(model, max_grad_norm=1.0)
    assert not PrivacyEngine().is_compatible(module=model)
    assert not any("forward" in vars(module) and module is model for module in model.modules())


def test_a_model_in_one_process_is_not_spread() -> None:
    assert not layout_of(make_model()).is_spread


def test_a_model_on_two_devices_of_one_process_is_refused_unless_one_of_them_holds_nothing_that_trains() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(UserError, match=r"0\.weight on cpu, 1\.weight on meta\. Put them on one device"):
        layout_of(model)
    model[1].requires_grad_(False)
    assert not layout_of(model).is_spread
