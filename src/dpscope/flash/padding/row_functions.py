"""Functions of torch that leave every row of a tensor in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# (tensor, result, args, kwargs of the function) -> is row b of the result made of row b of the tensor?
Keeps = Callable[[Tensor, Any, Any, Any], bool]


def _same_shape(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    return isinstance(result, Tensor) and result.shape == x.shape


def _elementwise(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    # Dimensions are matched from the last: with as many of them, the first is the first of x.
    fits = isinstance(result, Tensor) and result.dim() == x.dim() > 0 and result.shape[0] == x.shape[0]
    return fits and not _has_other_rows(x, (args, kwargs))


def _has_other_rows(x: Tensor, value: Any) -> bool:
    """Return True if an operand has as many rows as x and no marks: they may be x's own rows, moved."""
    if isinstance(value, Tensor):
        # `_rows`, for `rows` is gone after a write in place; one that was gone before has been noticed by now.
        return getattr(value, "_rows", None) is None and value.dim() >= x.dim() and value.shape[0] == x.shape[0] > 1
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return any(_has_other_rows(x, each) for each in values)


def _in_order(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    # All elements stay in their order: with as many rows, each row has the elements that it had.
    return isinstance(result, Tensor) and result.dim() > 0 and result.shape[0] == x.shape[0]


def _columns(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    """Accept x[:, 1:] and x[..., 0]: all rows, and the same part of each."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not all(each is Ellipsis or each is None or type(each) in (slice, int) for each in index):
        return False  # tensors and masks as indices put their own dimensions first
    all_rows = index[:1] == (slice(None),) or (index[:1] == (Ellipsis,) and len(index) <= x.dim())
    return all_rows and result.dim() > 0 and result.shape[0] == x.shape[0]


def _elsewhere(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    return True


def _filled(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    """Accept x[mask] = number."""
    return not (isinstance(args[2], Tensor) and args[2].dim()) and not _has_other_rows(x, args[1])


def _transposed(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    return not kwargs and all(dim % x.dim() != 0 for dim in args[1:])


def _permuted(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    dims = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
    return not kwargs and dims[0] % x.dim() == 0


def _joined(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    """Accept torch.cat([x, y], dim=1)."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return type(dim) is int and dim % x.dim() != 0 and _elementwise(x, result, args, kwargs)


def _cut(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    """Accept x.chunk(2, dim=-1): each part has all rows."""
    return all(_elementwise(x, each, args, kwargs) for each in result)


def _mirrored(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    """Accept x.flip(-1)."""
    dims = kwargs.get("dims", args[1:])
    dims = [dim for each in dims for dim in (each if isinstance(each, (tuple, list)) else (each,))]
    return all(dim % x.dim() != 0 for dim in dims)


def _around(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    """Accept F.pad, which begins at the last dimension, if it leaves the first as it is."""
    return len(args) > 1 and len(args[1]) < 2 * x.dim() and result.shape[0] == x.shape[0]


def _appended(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    return isinstance(result, Tensor) and result.shape[: x.dim()] == x.shape and x.dim() > 0


_COPIES = (
    "to cuda cpu pin_memory clone detach contiguous float half bfloat16 double long int short bool type type_as "
    "requires_grad_ share_memory_ detach_ retain_grad zeros_like ones_like full_like rand_like randn_like randint_like"
)
_ARITHMETIC = (
    "add sub subtract mul multiply div divide true_divide floor_divide remainder pow neg abs clamp clip clamp_min "
    "clamp_max exp log log1p sqrt rsqrt square sigmoid tanh round floor ceil sin cos where masked_fill eq ne lt le gt "
    "ge logical_not logical_and logical_or bitwise_and bitwise_or bitwise_not lerp nan_to_num isnan isfinite"
)
_DUNDERS = (
    "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ "
    "__itruediv__ __div__ __rdiv__ __idiv__ __floordiv__ __mod__ __pow__ __rpow__ __neg__ __abs__ __eq__ __ne__ __lt__ "
    "__le__ __gt__ __ge__ __invert__ __and__ __or__"
)
_RESHAPING = "view reshape flatten unflatten unsqueeze squeeze view_as reshape_as"


def _functions(names: str) -> Iterable[Callable[..., Any]]:
    """Yield torch's functions and methods of these names, and their in-place variants."""
    for name in names.split():
        for home in (Tensor, torch):
            for each in (name, f"{name}_"):
                function = getattr(home, each, None)
                if function is not None:
                    yield function


KEEPS: dict[Any, Keeps] = {
    **dict.fromkeys(_functions(_COPIES), _same_shape),
    **dict.fromkeys(_functions(_ARITHMETIC), _elementwise),
    **dict.fromkeys((getattr(Tensor, name) for name in _DUNDERS.split() if hasattr(Tensor, name)), _elementwise),
    **dict.fromkeys(_functions(_RESHAPING), _in_order),
    **dict.fromkeys(_functions("transpose swapaxes"), _transposed),
    **dict.fromkeys(_functions("permute"), _permuted),
    Tensor.__getitem__: _columns,
    Tensor.__setitem__: _filled,
    Tensor.grad.__set__: _elsewhere,  # type: ignore[union-attr]
    Tensor.requires_grad.__set__: _elsewhere,  # type: ignore[attr-defined]
    **dict.fromkeys(_functions("cat concat"), _joined),
    **dict.fromkeys(_functions("chunk"), _cut),
    **dict.fromkeys(_functions("flip"), _mirrored),
    F.pad: _around,
    F.interpolate: _elementwise,
    F.one_hot: _appended,
}
# Properties, read often: they give no tensor and write none.
READS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_leaf", "grad_fn", "layout")
} | {Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.is_inference, Tensor.__len__, Tensor.data_ptr}


def may_write(func: Callable[..., Any]) -> bool:
    """Return whether a function may write: in place, or by setting a property. Not all of them raise the version."""
    name = getattr(func, "__name__", "")
    return name == "__set__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
