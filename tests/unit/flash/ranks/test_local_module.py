"""Forward passes without collectives, with made-up weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dpscope.flash.ranks.local_module import made_up_weight, made_up_weights
from dpscope.instruments.trace.attribution import CollectiveBytes
from tests.unit.flash.ranks import world as w


@pytest.fixture(autouse=True)
def two_processes() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sharded_model_runs_without_a_collective_and_is_afterwards_what_it_was(dtype: torch.dtype) -> None:
    model = w.shard(w.make_model(), init_device_mesh("cpu", (2,)))
    before = dict(model.named_parameters())
    hooks = [dict(module._forward_pre_hooks) for module in model.modules()]
    x = torch.randn(3, w.LENGTH, w.WIDTH, dtype=dtype)
    with torch.no_grad(), made_up_weights(model), CollectiveBytes() as seen:
        model.blocks[0](x)
        model.forward(torch.zeros(3, w.LENGTH, dtype=torch.long))
    assert seen.bytes == {}
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert hooks == [dict(module._forward_pre_hooks) for module in model.modules()]


def test_a_model_that_fails_is_put_back_as_well() -> None:
    model = w.shard(w.make_model(), init_device_mesh("cpu", (2,)))
    before = dict(model.named_parameters())
    with pytest.raises(ZeroDivisionError), made_up_weights(model):
        raise ZeroDivisionError
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("shape", [(), (7,), (5, 8), (4, 3, 2)])
def test_made_up_weights_are_small_in_memory_and_have_no_two_equal_rows(shape: tuple[int, ...]) -> None:
    values = made_up_weight(torch.Size(shape), torch.float32, torch.device("cpu"))
    assert values.shape == shape
    if shape:
        assert len(values.flatten(1).unique(dim=0) if len(shape) > 1 else values.unique()) == shape[0]
        assert values.untyped_storage().nbytes() <= 4 * (7 * shape[0] + torch.Size(shape[1:]).numel())
