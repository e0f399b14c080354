"""Forward passes of a sharded model without its weights, for rehearsals.

A rehearsal finds the rows of each layer that belong to each sample. How often it runs forward depends on the rank's own
batch, so a collective in it would wait for ranks that do not rehearse. The hooks of FSDP2 are therefore removed
meanwhile, and parameters of the same shapes replace the sharded ones. Their values are pseudo-random, and overlap in
memory: row i + 1 is row i moved on by a few elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dpscope.flash.torch_side.shards import local

_STEP = 7  # elements between the beginnings of two rows


def stand_in(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a pseudo-random tensor of that shape: a matrix of about 1/√fan-in, a vector of about 1."""
    width = shape[1:].numel()
    index = torch.arange(_STEP * max(0, shape[0] - 1) + width, dtype=torch.float64) if shape else torch.zeros(1)
    values = ((index + 1) * 12.9898).sin().mul(43758.5453).frac()
    values = 1 + values / 4 if len(shape) < 2 else values * math.sqrt(3 / width)
    base = values.to(device=device, dtype=dtype)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return base.as_strided(shape, [_STEP, *strides[1:]] if shape else [])


@contextmanager
def without_collectives(model: nn.Module) -> Iterator[None]:
    """Replace weights by stand-ins inside the block, so that the model's forward does not communicate."""
    modules = list(model.modules())
    parameters = [(module, dict(module._parameters)) for module in modules]
    hooks = [(hooks, dict(hooks)) for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    made: dict[Any, nn.Parameter] = {}
    mine = set(modules)

    def put(module: nn.Module, dtype: torch.dtype | None) -> None:
        for part in module.modules():
            for key, parameter in part._parameters.items():
                if parameter is None or not parameter.is_floating_point():
                    continue
                kind = (parameter.shape, dtype or parameter.dtype, local(parameter).device, parameter.requires_grad)
                if kind not in made:
                    made[kind] = nn.Parameter(stand_in(*kind[:3]), requires_grad=kind[3])
                part._parameters[key] = made[kind]

    def follow(module: nn.Module, args: tuple[Any, ...]) -> None:
        """Give a module's weights the dtype of its input, which FSDP2's mixed precision casts in its hooks."""
        tensors = (arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point())
        dtype = next((tensor.dtype for tensor in tensors), None)
        if module in mine and dtype is not None and not torch.is_autocast_enabled(args[0].device.type):
            put(module, dtype)

    handle = register_module_forward_pre_hook(follow)
    try:
        for own, entries in hooks:
            for key, hook in entries.items():
                if getattr(hook, "__module__", "").startswith("torch.distributed."):
                    del own[key]
        put(model, None)
        yield
    finally:
        handle.remove()
        for module, own_parameters in parameters:
            module._parameters.clear()
            module._parameters.update(own_parameters)
        for own, entries in hooks:
            own.clear()
            own.update(entries)
