"""An allocator's counts on a CPU: what torch's storages take, by following every operator's results."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpscope.flash.gradients.memory_budget import Allocated

# Kernels that hold nothing besides their results on a GPU; what stands for them on a CPU does.
KERNELS = (
    ("gradients.norms", "gram_norms_squared"),
    ("gradients.norms", "kept_norms_squared"),
    ("gradients.contributions", "kept_norms_squared"),
    ("gradients.contributions", "kept_sums"),
    ("gradients.contributions", "scaled_sums"),
    ("step.microbatch", "kept_sums"),
    ("checkpointing.recomputation", "projections"),
)


class LiveBytes(TorchDispatchMode):
    """Inside, `LiveBytes()()` tells what lives, and its peak: storages seen so far, each counted once."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.current = self.peak = 0
        self._known: dict[int, weakref.finalize] = {}
        self._in_kernel = False
        self._see(tensors)

    def __call__(self) -> Allocated:
        return Allocated(self.current, self.peak)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = function(*args, **(kwargs or {}))
        if not self._in_kernel:
            self._see(answer)
        return answer

    def count_results_of_kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And nothing that they make on the way."""
        for where, name in KERNELS:
            module = import_module(f"dpscope.flash.{where}")
            monkeypatch.setattr(module, name, self._kernel(getattr(module, name)))

    def _kernel(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._in_kernel = True
            try:
                answer = kernel(*args, **kwargs)
            finally:
                self._in_kernel = False
            self._see(answer)
            return answer

        return counted

    def _see(self, tree: Any) -> None:
        for tensor in pytree.tree_leaves(tree):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                address, size = storage.data_ptr(), storage.nbytes()
                if size and address not in self._known:
                    self._known[address] = weakref.finalize(storage, self._free, address, size)
                    self.current += size
                    self.peak = max(self.peak, self.current)

    def _free(self, address: int, size: int) -> None:
        del self._known[address]
        self.current -= size
