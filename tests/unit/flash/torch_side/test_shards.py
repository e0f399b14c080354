"""A sharded parameter and what this rank holds of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dpscope.flash.torch_side.shards import as_part_of, cut_of, first_element, is_sharded, local


@pytest.fixture(params=range(4))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """What each of four processes sees."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    yield request.param
    dist.destroy_process_group()


def test_a_shard_is_the_range_of_elements_that_its_cut_says(rank: int) -> None:
    layer = nn.Linear(3, 5)
    whole = layer.weight.detach().flatten().clone()
    fully_shard(layer, mesh=init_device_mesh("cpu", (4,)))
    weight = layer.weight
    assert is_sharded(weight)
    cut = cut_of(weight)
    assert first_element(weight) == cut.first == [0, 6, 12, 15][rank]
    assert torch.equal(local(weight).flatten(), whole[cut.first : cut.first + cut.held])


def test_a_part_of_a_gradient_becomes_a_gradient_in_the_same_memory(rank: int) -> None:
    layer = nn.Linear(3, 5)
    fully_shard(layer, mesh=init_device_mesh("cpu", (4,)))
    part = torch.zeros_like(local(layer.bias))
    layer.bias.grad = as_part_of(layer.bias, part)
    part.add_(1)
    assert layer.bias.grad.shape == (5,)
    assert local(layer.bias.grad).sum() == part.numel()


def test_a_whole_tensor_is_its_own_part() -> None:
    weight = nn.Parameter(torch.ones(3))
    assert local(weight) is weight
    assert as_part_of(weight, weight) is weight
    assert first_element(weight) == 0
