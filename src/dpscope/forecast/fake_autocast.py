"""Autocast for tensors of the fake device: torch's rules for CUDA, which its C++ applies to CUDA tensors alone.

While the context is open, each operator that torch casts for on CUDA has a kernel in Python under the same dispatch
key. The installed torch says which ones they are; how each casts is in torch's documentation of autocast.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

KEY = "AutocastCUDA"
_EXCLUDED = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

LOWER = {
    *("_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d"),
    *("conv_transpose2d.input", "conv_transpose3d.input", "convolution", "cudnn_convolution"),
    *("cudnn_convolution_transpose", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv"),
    *("linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot"),
    *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("scaled_dot_product_attention", "_scaled_dot_product_flash_attention"),
}
PROMOTED = {
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot"),
    "scatter_add",
}
# Given float32 as the dtype to compute in, in place of a cast of what they read.
TOLD = {
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm"),
    *("linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"),
}

Caster = Callable[[Any], Any]


@contextmanager
def fake_autocast() -> Iterator[None]:
    """Have autocast("cuda") treat tensors of the fake device as CUDA's."""
    cast_weights: dict[int, tuple[Tensor, Tensor]] = {}
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    clear = torch.clear_autocast_cache

    def forget() -> None:
        cast_weights.clear()
        clear()

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are overridden
            for name in torch._C._dispatch_get_registrations_for_dispatch_key(KEY):
                _register(library, name, cast_weights)
        with patch("torch.clear_autocast_cache", forget):
            yield
    finally:
        library._destroy()


def _register(library: Any, qualified: str, cast_weights: dict[int, tuple[Tensor, Tensor]]) -> None:
    name = qualified.removeprefix("aten::")
    base, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, base), overload or "default")
    if name in LOWER:
        kernel = partial(_lowered, operator, cast_weights)
    elif name in PROMOTED:
        kernel = partial(_promoted, operator)
    elif name in TOLD:
        kernel = partial(_told, operator)
    else:
        kernel = partial(_widened, operator)
    library.impl(name, kernel, KEY)


def _is_cast(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type in ("cuda", "meta")  # inside of vmap it is what C++ sees
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _lowered(operator: Any, cast_weights: dict[int, tuple[Tensor, Tensor]], *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype("cuda")

    def cast(value: Any) -> Any:
        if not _is_cast(value) or value.dtype == dtype:
            return value
        is_weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
        if not is_weight or not torch.is_autocast_cache_enabled():
            return value.to(dtype)
        if id(value) not in cast_weights:
            cast_weights[id(value)] = value, value.to(dtype)
        return cast_weights[id(value)][1]

    return _call(operator, cast, args, kwargs)


def _widened(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return _call(operator, lambda value: value.float() if _is_cast(value) else value, args, kwargs)


def _promoted(operator: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = [value for value in args if _is_cast(value)]
    wide = any(value.dtype == torch.float32 for value in tensors)
    dtype = torch.float32 if wide else torch.get_autocast_dtype("cuda")
    return _call(operator, lambda value: value.to(dtype) if _is_cast(value) else value, args, kwargs)


def _told(operator: Any, *args: Any, **kwargs: Any) -> Any:
    given = kwargs.get("dtype")
    names = [argument.name for argument in operator._schema.arguments]
    place = names.index("dtype") if "dtype" in names else len(args)
    if given is None and len(args) <= place and _is_cast(args[0]):
        kwargs = {**kwargs, "dtype": torch.float32}
    elif len(args) > place and args[place] is None and _is_cast(args[0]):
        args = (*args[:place], torch.float32, *args[place + 1 :])
    return _call(operator, lambda value: value, args, kwargs)


def _call(operator: Any, cast: Caster, args: Any, kwargs: Any) -> Any:
    def cast_all(value: Any) -> Any:
        return [cast(each) for each in value] if isinstance(value, list | tuple) else cast(value)

    with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
        return operator(*map(cast_all, args), **{name: cast_all(value) for name, value in kwargs.items()})
