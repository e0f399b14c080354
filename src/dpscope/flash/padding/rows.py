"""How many rows of a batch are real: told by the batch's own tensors.

A `PaddedTensor` is an ordinary tensor that knows the rows of its batch. What cannot move a row to another place keeps
that knowledge: copies to a device or dtype, arithmetic, columns, reshaping. Everything else gives a plain tensor, which
knows nothing, and which an engine that expects padding refuses. So an engine never goes by the order of calls, and what
is fetched ahead, moved, skipped or shuffled is right or refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dpscope.errors import UserError
from dpscope.flash.arguments import Leaf, leaves_in, replace_leaves, rows_of, take

BatchLike = TypeVar("BatchLike")


class Rows(NamedTuple):
    """Rows 0 … real−1 of a batch are samples; the others, up to `size`, are padding.

    `draw`: the number of the draw that the batch is a part of; `more`: other parts of it follow.
    """

    real: int
    size: int
    draw: int | None = None
    more: bool = False


class PaddedTensor(Tensor):
    rows: Rows | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            keeps = _KEEPS.get(func)
            if keeps is None and func in _READS:
                return func(*args, **kwargs)
            known = _padded_in((args, kwargs))
            versions = [None if each.is_inference() else each._version for each in known]
            result = func(*args, **kwargs)
            rows = known[0].rows if len({each.rows for each in known}) == 1 else None
            kept = rows is not None and keeps is not None and keeps(known[0], result, args, kwargs)
            if not kept:
                for each, version in zip(known, versions, strict=True):
                    if version is not None and each._version != version:  # written into, nobody knows how
                        each.rows = None
                return result
            return result if result is None else _mark(result, rows)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _mark, (_plain(self), self.rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> PaddedTensor:
        memo[id(self)] = copied = _mark(_plain(self).detach().clone(), self.rows)
        return copied


def _mark(tensor: Tensor, rows: Rows | None) -> PaddedTensor:
    if isinstance(tensor, PaddedTensor):
        tensor.rows = rows
        return tensor
    marked = tensor.as_subclass(PaddedTensor)
    marked.rows = rows
    return marked


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _padded_in(value: Any) -> list[PaddedTensor]:
    found: list[PaddedTensor] = []
    stack = [value]
    while stack:
        each = stack.pop()
        if isinstance(each, PaddedTensor):
            found.append(each)
        elif isinstance(each, (tuple, list)):
            stack.extend(each)
        elif isinstance(each, dict):
            stack.extend(each.values())
    return found


# -- which functions of torch leave every row where it is: (tensor, result, args, kwargs) -> do they, here? ------------


def _same_shape(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    return isinstance(result, Tensor) and result.shape == x.shape


def _elementwise(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    # Dimensions are matched from the last: with as many of them, the first is the first of x.
    return isinstance(result, Tensor) and result.dim() == x.dim() > 0 and result.shape[0] == x.shape[0]


def _in_order(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    # All elements stay in their order: with as many rows, each row has the elements that it had.
    return isinstance(result, Tensor) and result.dim() > 0 and result.shape[0] == x.shape[0]


def _columns(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    """x[:, 1:], x[..., 0]: all rows, and of each the same part."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not all(each is Ellipsis or each is None or type(each) in (slice, int) for each in index):
        return False  # tensors and masks as indices put their own dimensions first
    all_rows = index[:1] == (slice(None),) or (index[:1] == (Ellipsis,) and len(index) <= x.dim())
    return all_rows and result.dim() > 0 and result.shape[0] == x.shape[0]


def _filled(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    """x[mask] = number."""
    return not (isinstance(args[2], Tensor) and args[2].dim())


def _transposed(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    return not kwargs and all(dim % x.dim() != 0 for dim in args[1:])


def _permuted(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    dims = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
    return not kwargs and dims[0] % x.dim() == 0


def _appended(x: Tensor, result: Any, args: Any, kwargs: Any) -> bool:
    return isinstance(result, Tensor) and result.shape[: x.dim()] == x.shape and x.dim() > 0


_COPIES = (
    "to cuda cpu pin_memory clone detach contiguous float half bfloat16 double long int short bool type type_as "
    "requires_grad_ share_memory_ detach_ retain_grad"
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
    """Torch's functions and methods of these names, and those that write in place."""
    for name in names.split():
        for home in (Tensor, torch):
            for each in (name, f"{name}_"):
                function = getattr(home, each, None)
                if function is not None:
                    yield function


_KEEPS: dict[Any, Callable[[Tensor, Any, Any, Any], bool]] = {
    **dict.fromkeys(_functions(_COPIES), _same_shape),
    **dict.fromkeys(_functions(_ARITHMETIC), _elementwise),
    **dict.fromkeys((getattr(Tensor, name) for name in _DUNDERS.split() if hasattr(Tensor, name)), _elementwise),
    **dict.fromkeys(_functions(_RESHAPING), _in_order),
    **dict.fromkeys(_functions("transpose swapaxes"), _transposed),
    **dict.fromkeys(_functions("permute"), _permuted),
    Tensor.__getitem__: _columns,
    Tensor.__setitem__: _filled,
    F.one_hot: _appended,
}
# Properties, read often: they give no tensor and write none.
_READS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_leaf", "grad_fn", "layout")
} | {Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.is_inference, Tensor.__len__, Tensor.data_ptr}


# -- batches -----------------------------------------------------------------------------------------------------------


def mark_batch(batch: BatchLike, rows: Rows) -> BatchLike:
    """The batch, with tensors that know its rows: all that have `rows.size` of them."""
    marked = 0

    def mark(leaf: Leaf) -> Leaf:
        nonlocal marked
        if not isinstance(leaf, Tensor) or leaf.shape[0] != rows.size:
            return leaf
        marked += 1
        return _mark(_plain(leaf) if isinstance(leaf, PaddedTensor) else leaf, rows)

    result: BatchLike = replace_leaves(batch, mark)
    if not marked:
        raise UserError(
            f"a batch was padded to {rows.size} rows, but no tensor in it has that many, which could tell how many are "
            "real: have collate_fn return tensors with the samples in the first dimension, or leave out pad_batches"
        )
    return result


def rows_in(value: Any) -> Rows | None:
    """What the tensors of a batch, or of a call, know of its rows; None where they know nothing.

    Raises UserError where they are of different batches.
    """
    found = {leaf.rows for leaf in leaves_in(value) if isinstance(leaf, PaddedTensor)} - {None}
    if len(found) > 1:
        one, other, *_ = sorted(rows for rows in found if rows is not None)
        raise UserError(
            f"tensors of two padded batches are used together, one of {one.real} samples in {one.size} rows and one of "
            f"{other.real} in {other.size}: which rows are real is not known; use one batch at a time"
        )
    return next(iter(found), None)


def without_marks(value: BatchLike) -> BatchLike:
    """The same with plain tensors."""
    plain: BatchLike = replace_leaves(value, lambda leaf: _plain(leaf) if isinstance(leaf, PaddedTensor) else leaf)
    return plain


def has_marks(value: Any) -> bool:
    return any(isinstance(leaf, PaddedTensor) for leaf in leaves_in(value))


def real_rows(batch: Any) -> int:
    """How many rows of a batch are samples: the first ones. The others are padding, if the batch is padded.

    For the user's own figures: `losses[: real_rows(x)].mean()`.
    """
    rows = rows_in(batch)
    if rows is not None:
        return rows.real
    leaves = leaves_in(batch)
    if not leaves:
        raise UserError("real_rows needs a tensor of the batch, or the batch")
    return rows_of(leaves[0])


def same_rows(new: BatchLike, batch: Any) -> BatchLike:
    """`new`, made of a padded batch and with row b still sample b, as tensors of that batch: the engine knows them."""
    rows = rows_in(batch)
    return new if rows is None else mark_batch(new, rows)


def pad_batch(batch: BatchLike, size: int) -> BatchLike:
    """The batch with `size` rows: copies of its first sample (of none: zeros) are appended, which weigh nothing."""
    leaves = leaves_in(batch)
    if not leaves:
        raise UserError("pad_batch needs a batch with a tensor in it")
    real = rows_of(leaves[0])
    if real > size:
        raise UserError(f"a batch of {real} samples cannot be padded to {size} rows")
    index = torch.cat([torch.arange(real), torch.zeros(size - real, dtype=torch.long)])

    def pad(leaf: Leaf) -> Leaf:
        if rows_of(leaf) != real:
            return leaf
        if real == 0 and isinstance(leaf, Tensor):
            return leaf.new_zeros((size, *leaf.shape[1:]))
        return take(leaf, index, 0)

    padded: BatchLike = replace_leaves(without_marks(batch), pad)
    return mark_batch(padded, Rows(real, size))


class PaddingCount:
    """How many rows were trained on so far, and how many of them were padding."""

    def __init__(self) -> None:
        self.rows = 0
        self.padded = 0
        self.sizes: Counter[int] = Counter()  # how many batches had how many rows

    def add(self, rows: Rows) -> None:
        self.rows += rows.size
        self.padded += rows.size - rows.real
        self.sizes[rows.size] += 1

    @property
    def share(self) -> float:
        """Of all rows, those that were padding; 0 where there were none."""
        return self.padded / self.rows if self.rows else 0.0

    def __str__(self) -> str:
        sizes = ", ".join(f"{count} of {size}" for size, count in sorted(self.sizes.items()))
        return f"padding: {self.share:.1%} of {self.rows} rows; batches: {sizes}"
