"""A sharded model as a local module: forward passes without FSDP2's hooks, which would wait for other ranks.

made_up_weights  for verification. How often it runs forward depends on the rank's own batch, so nothing may be
                 gathered: parameters of the same shapes replace the sharded ones. Their values are pseudo-random, and
                 overlap in memory: row i + 1 is row i moved on by a few elements.
whole_weights    for checkpointed blocks that run again. All ranks gather the weights of a block, once for its forward
                 and backward, whether they run it or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from dpscope.flash.torch_side.shards import local

_STEP = 7  # elements between the beginnings of two rows


def made_up_weight(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a pseudo-random tensor of that shape: a matrix of about 1/√fan-in, a vector of about 1."""
    width = shape[1:].numel()
    index = torch.arange(_STEP * max(0, shape[0] - 1) + width, dtype=torch.float64) if shape else torch.zeros(1)
    values = ((index + 1) * 12.9898).sin().mul(43758.5453).frac()
    values = 1 + values / 4 if len(shape) < 2 else values * math.sqrt(3 / width)
    base = values.to(device=device, dtype=dtype)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return base.as_strided(shape, [_STEP, *strides[1:]] if shape else [])


Hook = Callable[..., Any]


@contextmanager
def _restored(dictionaries: Iterable[dict[Any, Any]]) -> Iterator[None]:
    """Restore the contents of dictionaries, in their order, after the block."""
    before = [(own, dict(own)) for own in dictionaries]
    try:
        yield
    finally:
        for own, entries in before:
            own.clear()
            own.update(entries)


@contextmanager
def _without_hooks(modules: Iterable[nn.Module], cast: Callable[[nn.Module, bool], Hook | None]) -> Iterator[None]:
    """Replace FSDP2's hooks inside the block by `cast` of the module, before (True) and after its forward."""
    hooks = [
        (module, before, hooks)
        for module in modules
        for before, hooks in ((True, module._forward_pre_hooks), (False, module._forward_hooks))
    ]
    with _restored(own for _, _, own in hooks):
        for module, before, own in hooks:
            for key, hook in list(own.items()):
                if getattr(hook, "__module__", "").startswith("torch.distributed."):
                    instead = cast(module, before)
                    if instead is None:
                        del own[key]
                    else:
                        own[key] = instead
        yield


@contextmanager
def made_up_weights(model: nn.Module) -> Iterator[None]:
    """Replace weights by made-up ones inside the block, so that the model's forward does not communicate."""
    modules = list(model.modules())
    made: dict[Any, nn.Parameter] = {}
    mine = set(modules)

    def put(module: nn.Module, dtype: torch.dtype | None) -> None:
        for part in module.modules():
            for key, parameter in part._parameters.items():
                if parameter is None or not parameter.is_floating_point():
                    continue
                kind = (parameter.shape, dtype or parameter.dtype, local(parameter).device, parameter.requires_grad)
                if kind not in made:
                    made[kind] = nn.Parameter(made_up_weight(*kind[:3]), requires_grad=kind[3])
                    made[kind].is_made_up = True  # type: ignore[attr-defined]
                part._parameters[key] = made[kind]

    def follow(module: nn.Module, args: tuple[Any, ...]) -> None:
        """Give a module's weights the dtype of its input, which FSDP2's mixed precision casts in its hooks."""
        tensors = (arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point())
        dtype = next((tensor.dtype for tensor in tensors), None)
        if module in mine and dtype is not None and not torch.is_autocast_enabled(args[0].device.type):
            put(module, dtype)

    kept = _restored(module._parameters for module in modules)
    with kept, register_module_forward_pre_hook(follow), _without_hooks(modules, lambda module, before: None):
        put(model, None)
        yield


@contextmanager
def whole_weights(modules: Sequence[Any]) -> Iterator[None]:
    """Gather the weights of these FSDP2 modules for the block, in which they run without further communication."""
    for module in modules:
        module.unshard()
    try:
        with _without_hooks(modules, _cast_of):
            yield
    finally:
        for module in modules:
            module.reshard()


def _cast_of(module: Any, before: bool) -> Hook | None:
    """Return the casts of FSDP2's hooks, which the module's policy of mixed precision asks for."""
    policy = module._get_fsdp_state()._mp_policy
    dtype = (policy.param_dtype if policy.cast_forward_inputs else None) if before else policy.output_dtype
    if dtype is None:
        return None

    def cast(values: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, values
        )

    if before:
        return lambda module, args, kwargs: (cast(args), cast(kwargs))
    return lambda module, args, output: cast(output)
