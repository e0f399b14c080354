"""A simulated CUDA device: torch runs a step on fake tensors, which have shapes and storages but no values.

In Python a tensor of this device reports `cuda:0`. The dispatcher gives it CUDA's keys, which autocast and autograd
use. In C++ it is on `meta`, so that streams and device guards never look for a GPU.
Operators that C++ chooses by the device are chosen in `cuda_operators.py`; allocations are counted in `allocator.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from dpscope.flash.kernels import noise, philox
from dpscope.flash.torch_side.dry_run import DryRun, dry_running
from dpscope.flash.torch_side.shards import is_shard_type
from dpscope.forecast import fake_values
from dpscope.forecast.allocator import Allocator
from dpscope.forecast.cards import Card
from dpscope.forecast.cuda_operators import cuda_operators, grouped_product
from dpscope.forecast.fake_autocast import fake_autocast
from dpscope.forecast.remembered_results import RememberedResults
from dpscope.instruments import gradient_sums

DEVICE = torch.device("cuda:0")


@contextmanager
def open_device(card: Card, limit: int | None = None) -> Iterator[FakeDevice]:
    """Open the device. Inside, tensors are fake, and its allocator counts their memory.

    `limit`: bytes that the allocator may reserve; a step that needs more ends with `OutOfFakeMemory`.
    """
    gradient_sums.prepare()
    allocator = Allocator(card, limit)
    mode = _Mode(allocator)  # before the patches: it imports what looks at the functions that they replace
    run = DryRun(card.capability, card.multiprocessors, lambda: (allocator.current, allocator.peak))
    with ExitStack() as stack:
        for each in (*_patches(card), patch.object(torch.UntypedStorage, "resize_", _resizing(allocator))):
            stack.enter_context(each)
        stack.enter_context(fake_autocast())
        stack.enter_context(cuda_operators(card))
        stack.enter_context(dry_running(run))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # the modes are of this thread
        stack.enter_context(mode)
        yield FakeDevice(allocator, run, mode)


# Operators that write into what they are given, give nothing back, and have no kernel for fake tensors.
_IN_PLACE = ("aten::_fused_sgd_", "aten::_fused_adagrad_", "fsdp::chunk_cat")
# Collectives that return the tensor they wrote into, and a handle to wait for.
_COLLECTIVES = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")
# Ranges for torch.profiler, of which FSDP opens thousands: they concern no tensor.
_RANGES = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}
_READING = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.allclose.default}
_USUAL_TYPES = ((), (FakeTensor,))


class _Mode(FakeTensorMode):
    """Mode in which tensors are fake. It counts their memory and tracks known values.

    Operators inside torch's implementation of fake tensors are ignored: a GPU runs other kernels in their place.
    """

    def __init__(self, allocator: Allocator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allocator = allocator
        self._results = RememberedResults(self)
        self._handles: dict[str, Any] = {}  # of collectives, which are all done at once
        self._is_inside = False
        self._has_chosen = False
        self.routes_rows = False  # to experts, which values choose

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper that keeps torch.compile away takes time

    def __deepcopy__(self, memo: object) -> _Mode:  # of a copied tensor
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types not in _USUAL_TYPES and any(map(is_shard_type, types)):
            return NotImplemented  # until it has come to the parts that this rank holds
        kwargs = kwargs or {}
        if func in _RANGES:
            return func(*args, **kwargs)
        if (device := kwargs.get("device")) is not None and device.type == "meta":  # which C++ calls it
            kwargs = {**kwargs, "device": DEVICE}
        func = gradient_sums.as_without_modes(func, args, sys._getframe().f_back)
        if self._is_inside:
            return self._results.call(func, args, kwargs, partial(self._compute, func, types))
        if func in _READING:
            self.routes_rows |= self._has_chosen
            return fake_values.read(func, args, kwargs)
        self._is_inside = True
        try:
            result = self._results.call(func, args, kwargs, partial(self._compute, func, types))
        except fake_tensor.DynamicOutputShapeException:
            self._is_inside = False
            self.routes_rows |= self._has_chosen
            with self:
                return fake_values.shaped_by_values(func, args, kwargs)
        finally:
            self._is_inside = False
        self._allocator.note_call(func, args, result)
        self._has_chosen |= fake_values.choose(func, args, result)
        fake_values.follow(func, args, kwargs, result)
        return result

    def _compute(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        if name in _IN_PLACE:
            return None
        if name in self._handles:
            return args[0], self._handles[name]
        if name == "aten::_grouped_mm":
            self.routes_rows = True
            with self:
                return grouped_product(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs"))
        result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if name in _COLLECTIVES:
            self._handles[name] = result[1]
        return result


class FakeDevice:
    """Fake CUDA device that counts what is allocated on it, and copies values to it."""

    def __init__(self, allocator: Allocator, run: DryRun, mode: _Mode) -> None:
        self.allocator = allocator
        self.run = run
        self._mode = mode

    @property
    def routes_rows(self) -> bool:
        """True if a model has sent rows to experts by values, which are taken to choose evenly."""
        return self._mode.routes_rows

    def put(self, tensor: Tensor, sizes: Mapping[int, int] | None = None) -> Tensor:
        """Return a fake copy on the device of a tensor of the CPU. `sizes`: of its first dimension, to repeat it to.

        Integer values are kept, because ids and masks decide what some models do.
        """
        rows = (sizes or {}).get(len(tensor)) if tensor.dim() else None
        shape = tensor.shape if rows is None else (rows, *tensor.shape[1:])
        fake = torch.empty(shape, dtype=tensor.dtype, device=DEVICE)
        if not tensor.is_floating_point() and math.prod(shape) <= fake_values.LARGEST_VALUE:
            with _disable_current_modes():
                value = tensor if shape == tensor.shape else tensor[torch.arange(shape[0]) % len(tensor)]
                fake_values.know(fake, value.clone())  # a model may write into what it is given
        return fake


def _patches(card: Card) -> Iterator[Any]:
    """Yield patches for calls that ask for a GPU on the way to a fake tensor."""
    make = torch.Tensor._make_subclass

    def on_meta(cls: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if issubclass(cls, FakeTensor):
            kwargs["dispatch_device"] = False
        return make(cls, *args, **kwargs)

    yield patch.object(torch.Tensor, "_make_subclass", staticmethod(on_meta))
    yield patch.object(torch.Tensor, "data_ptr", _address)
    yield patch.object(torch.UntypedStorage, "data_ptr", _storage_address)
    yield patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    yield patch("torch.cuda.is_bf16_supported", lambda *args, **kwargs: True)
    yield patch("torch.cuda.current_device", lambda: 0)
    yield patch("torch.cuda.get_device_capability", lambda device=None: card.capability)
    yield patch("torch.cuda.default_generators", (torch.Generator(),))
    for name in ("init_gpu_context", "init_cuda_context"):  # which would take memory of a GPU that is here
        if hasattr(fake_tensor, name):
            yield patch.object(fake_tensor, name, lambda *args: None)
    yield patch("torch.cuda.get_rng_state", lambda device=None: torch.get_rng_state())
    yield patch("torch.cuda.set_rng_state", lambda state, device=None: None)
    yield patch.object(torch.amp.autocast_mode.autocast, "__init__", _begin_autocast)
    yield patch.object(FakeTensor, "__deepcopy__", _copied)
    yield patch.object(noise, "normals", _normals)
    yield patch.object(torch.nn.Module, "to", _moved)
    yield patch("torch.utils.swap_tensors", _take)
    for name in ("transformers.utils.import_utils", "transformers.masking_utils"):
        if hasattr(sys.modules.get(name), "is_fake_tensor"):  # its models take a fake tensor for one that is exported
            yield patch(f"{name}.is_fake_tensor", lambda tensor: False)
    if (triton := sys.modules.get("triton")) is not None:
        yield patch.object(triton.runtime.jit.JITFunction, "run", _launched)


def _launched(kernel: Any, *args: Any, **kwargs: Any) -> None:
    """Do what a Triton kernel does here: nothing, but what it may have written is not known any more."""
    for each in args:
        if isinstance(each, FakeTensor) and each.is_floating_point():
            fake_values.forget(each)


def _resizing(allocator: Allocator) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
    plain: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        plain(storage, size)
        allocator.note_resized(storage)
        return storage

    return resize


def _copied(tensor: FakeTensor, memo: dict[int, Any]) -> Tensor:
    """Return a deep copy whose storage is counted."""
    copy: Tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        copy = torch.nn.Parameter(copy, tensor.requires_grad)
    memo[id(tensor)] = copy
    return copy


def _take(parameter: Any, moved: Any) -> None:
    """Do what `Module.to` and `Module.half` do for a fake parameter, which cannot be swapped with another tensor."""
    if moved is not parameter:
        fake_values.forget(parameter)
        parameter.data = moved.data
        parameter.fake_device = moved.fake_device


_autocast = torch.amp.autocast_mode.autocast.__init__


def _begin_autocast(context: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    """Begin autocast for the device that C++ sees inside of vmap."""
    _autocast(context, "cuda" if device_type == "meta" else device_type, *args, **kwargs)


_to = torch.nn.Module.to


def _moved(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Do `Module.to`. On `meta`, where Opacus puts copies of layers to learn their shapes, nothing is counted."""
    if args[:1] not in (("meta",), (torch.device("meta"),)):
        return _to(module, *args, **kwargs)
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                part._parameters[key] = torch.nn.Parameter(empty, parameter.requires_grad)
    return module


def _normals(block: Tensor, seed: int, offset: int) -> Tensor:
    """Make noise of blocks whose numbers nobody reads: a card without Triton's kernels needs thousands of calls."""
    fake_values.forget(block)
    return philox.normals(block, seed, offset)


_data_ptr: Callable[[Tensor], int] = torch.Tensor.data_ptr
_storage_data_ptr: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.data_ptr


def _address(tensor: Tensor) -> int:
    """Return an address that no other storage has, aligned as CUDA's are."""
    if not isinstance(tensor, FakeTensor):
        return _data_ptr(tensor)
    return int(tensor.untyped_storage()._cdata * 256 + tensor.storage_offset() * tensor.element_size())


def _storage_address(storage: torch.UntypedStorage) -> int:
    return storage._cdata * 256 if storage.device.type == "meta" else _storage_data_ptr(storage)
