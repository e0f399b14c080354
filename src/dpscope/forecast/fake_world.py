"""One rank of a model that is spread over several processes, on the fake device, without the other processes.

torch's own fake process group answers collectives at once, so FSDP2 shards, gathers and reduces as it would, and flash
clipping and Opacus with it. Streams and events, by which it orders them, do nothing here. DDP's reducer is C++ code
that reads tensors. Here only its buckets are modelled: they are as large as all gradients and live as long as the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from dpscope.errors import UserError
from dpscope.forecast.allocator import Allocator
from dpscope.vocabulary.settings import TrainerSettings

_DDP, _FSDP = "torch.nn.parallel.distributed", "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"


class _Idle:
    """A stream or an event: whatever is asked of it is done at once."""

    stream_id = device_index = device_type = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _Idle


class _Reducer:
    """DDP's buckets of gradients, which travel in each backward pass."""

    def __init__(self, parameters: list[Tensor], buckets: list[list[int]], *args: Any, **kwargs: Any) -> None:
        self.buckets = []
        for places in buckets:
            first, size = parameters[places[0]], sum(parameters[place].numel() for place in places)
            self.buckets.append(torch.empty(size, dtype=first.dtype, device=first.device))

    def prepare_for_backward(self, outputs: list[Tensor]) -> None:
        for bucket in self.buckets:
            dist.all_reduce(bucket)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _bucket_by_dtype(tensors: list[Tensor], *args: Any) -> tuple[list[list[int]], list[int]]:
    """Return one bucket for each dtype. Together they are as large as DDP's buckets, whatever their number."""
    places: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(place)
    return list(places.values()), [0] * len(places)


@contextmanager
def fake_world(settings: TrainerSettings, allocator: Allocator) -> Iterator[None]:
    """Act as rank 0 of a row's processes, if there are several."""
    if settings.world_size == 1:
        yield
        return
    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):
        raise UserError(
            f"a plan of several processes takes a newer torch: collectives of {torch.__version__} do not run on "
            "fake tensors: plan one process, or pip install --upgrade torch"
        )
    if dist.is_initialized():
        raise UserError("this process is one of several already: make a plan of several processes in another one")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=settings.world_size)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for each in _patches(allocator):
            stack.enter_context(each)
        yield


def _patches(allocator: Allocator) -> Iterator[Any]:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    for name in ("Stream", "Event", "current_stream"):
        yield patch(f"torch.cuda.{name}", _Idle)
    yield patch("torch.cuda.stream", lambda stream: nullcontext())
    yield patch("torch._C._get_accelerator", lambda *args: torch.device("cuda"), create=True)
    for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
        yield patch(f"{_DDP}.{name}", MagicMock())
    yield patch(f"{_DDP}.dist.Logger", MagicMock())
    yield patch(f"{_DDP}.dist.Reducer", _Reducer)
    yield patch(f"{_DDP}.dist._compute_bucket_assignment_by_size", _bucket_by_dtype)
    yield patch(f"{_FSDP}._validate_no_meta_params", MagicMock(), create=True)
    yield patch.object(DTensor, "device", property(lambda tensor: tensor._local_tensor.device), create=True)
    yield patch.object(DeviceMesh, "__deepcopy__", lambda mesh, memo: mesh, create=True)  # Opacus copies a layer
    for name in ("__init__", "__getitem__"):
        yield patch.object(DeviceMesh, name, _with_values(getattr(DeviceMesh, name)))
    for place in ("torch.distributed.device_mesh", "torch.distributed.fsdp._fully_shard._fsdp_init"):
        yield patch(f"{place}.init_device_mesh", _with_values(init_device_mesh))
    name = "_propagate_tensor_meta_non_cached"
    yield patch.object(ShardingPropagator, name, _uncounted(allocator, getattr(ShardingPropagator, name)))


def _with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function read the values of its own tensors, on the host."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _uncounted(allocator: Allocator, function: Callable[..., Any]) -> Callable[..., Any]:
    """Do not count a function's tensors: DTensor makes whole fake ones, on a real device too, to find shapes."""

    def call(*args: Any) -> Any:
        counting, allocator.counting = allocator.counting, False
        try:
            return function(*args)
        finally:
            allocator.counting = counting

    return call
