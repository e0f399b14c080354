"""What an older torch cannot do exactly is refused in a sentence that says which torch it takes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from dpscope.flash.ranks.layout import layout_of
from dpscope.flash.torch_side.frames import eagerly
from dpscope.flash.torch_side.torch_version import (
    OLDEST_COMPILED,
    OLDEST_SHARDED,
    require_for_compiled,
    require_for_shards,
)
from tests import ROOT

LEAST = {
    name: ".".join(map(str, least)) for name, least in {"compiled": OLDEST_COMPILED, "sharded": OLDEST_SHARDED}.items()
}
COMPILED_TAKES = re.escape(
    f"compiled model takes torch {LEAST['compiled']} or newer, and this is torch 2.6.0+cu124: leave out torch.compile"
)


@pytest.fixture
def _old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0+cu124")


@pytest.fixture
def _two_processes() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.usefixtures("_old_torch")
@pytest.mark.parametrize("part", ["the model", "a layer"])
def test_what_is_compiled_before_it_is_made_private_is_refused_at_once(part):
    model = make_model()
    model.compile(backend="eager") if part == "the model" else model[0].compile(backend="eager")
    with pytest.raises(UserError, match=COMPILED_TAKES):
        FlashEngine(model, max_grad_norm=1.0)
    assert "forward" not in vars(model[2])  # nothing is left tapped


@pytest.mark.usefixtures("_old_torch")
@pytest.mark.parametrize("part", ["the model", "in place", "a layer"])
def test_what_is_compiled_afterwards_is_refused_at_the_first_batch(part):
    model = called = make_model()
    with FlashEngine(model, max_grad_norm=1.0):
        if part == "the model":
            called = torch.compile(model, backend="eager")
        else:
            (model if part == "in place" else model[0]).compile(backend="eager")
        with pytest.raises(UserError, match=COMPILED_TAKES):
            called(torch.randn(3, 6))


@pytest.mark.usefixtures("_old_torch", "_two_processes")
def test_a_sharded_model_is_refused_and_a_replicated_one_is_not():
    sharded = fully_shard(make_model(), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(UserError, match=r"sharded model .* takes torch 2\.7 or newer.*: use DistributedDataParallel$"):
        layout_of(sharded)
    assert layout_of(DistributedDataParallel(make_model())).is_spread


@pytest.mark.usefixtures("_old_torch", "_two_processes")
def test_tensor_parallelism_is_refused_by_its_name_and_not_for_the_release():
    parallel = parallelize_module(make_model(), init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    with pytest.raises(UserError, match="not by fully_shard"):
        layout_of(parallel)


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+5228986c39.nv26.02", "2.13.0+cpu", "3.0"])
def test_newer_releases_and_what_comes_before_them_are_taken(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    require_for_compiled()
    require_for_shards()


def test_models_that_run_eagerly_lose_no_references_to_none():
    """torch 2.6 loses some each time, and Python before 3.12 ends when none is left."""
    before = sys.getrefcount(None)
    for _ in range(100):
        with eagerly():
            pass
    assert sys.getrefcount(None) > before - 50


def test_the_pages_name_the_same_releases():
    compiled, edges = ((ROOT / "docs" / name).read_text("utf-8") for name in ("compiled.md", "sharp-edges.md"))
    assert f"torch before {LEAST['compiled']}" in compiled
    assert all(f'"takes torch {least} or newer" ({name})' in edges for name, least in LEAST.items())
