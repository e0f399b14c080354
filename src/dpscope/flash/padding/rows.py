"""Real rows of a padded batch, which its own tensors know.

A `PaddedTensor` is an ordinary tensor that knows the rows of its batch. Operations that cannot move a row (`KEEPS`)
keep that knowledge: copies to a device or dtype, arithmetic, columns, reshaping. All others return a plain tensor,
which an engine that expects padding refuses. So an engine does not depend on the order of calls: a batch that is
fetched ahead, moved, skipped or shuffled is handled correctly or refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from dpscope.errors import UserError
from dpscope.flash.torch_side.arguments import Leaf, leaves_in, replace_leaves, rows_of, take
from dpscope.flash.torch_side.captures import own_capture
from dpscope.flash.torch_side.frames import in_graph

# -- functions of torch that leave every row of a tensor in its place --------------------------------------------------


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


# -- tensors -----------------------------------------------------------------------------------------------------------


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
    """Tensor that knows the rows of its batch, until something that may move them writes into its memory."""

    _rows: Rows | None = None
    _marked_version = 0

    @property
    def rows(self) -> Rows | None:
        return self._rows if self._marked_version == _version_of(self) else None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if in_graph() or func in READS:
                return func(*args, **kwargs)
            known = _padded_in((args, kwargs))
            found = {each.rows for each in known}
            result = func(*args, **kwargs)
            keeps = KEEPS.get(func)
            if len(found) == 1 and keeps is not None and keeps(known[0], result, args, kwargs):
                return _marked(result, args, found.pop())
            if may_write(func) and isinstance(args[0], PaddedTensor):  # not all that write count as a new version
                args[0]._rows = None
            return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _mark, (_plain(self), self.rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> PaddedTensor:
        memo[id(self)] = copied = _mark(_plain(self).detach().clone(), self.rows)
        return copied


def _version_of(tensor: Tensor) -> int:
    """Return the number of writes into a tensor's memory. Views share it."""
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if tensor.is_inference() else tensor._version


def _mark(tensor: Tensor, rows: Rows | None) -> PaddedTensor:
    marked = tensor if isinstance(tensor, PaddedTensor) else tensor.as_subclass(PaddedTensor)
    marked._rows, marked._marked_version = rows, _version_of(marked)
    return marked


def _marked(result: Any, args: tuple[Any, ...], rows: Rows | None) -> Any:
    """Mark the result of a function that keeps rows."""
    if isinstance(result, (tuple, list)):
        return type(result)(_mark(each, rows) for each in result)
    if isinstance(result, Tensor):
        return _mark(result, rows)
    if isinstance(args[0], PaddedTensor):  # x[mask] = number, which gives nothing
        _mark(args[0], rows)
    return result


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


# -- batches -----------------------------------------------------------------------------------------------------------


def mark_batch(batch: BatchLike, rows: Rows) -> BatchLike:
    """Return the batch with marks on all tensors that have `rows.size` rows."""
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
            f"a batch was padded to {rows.size} rows, but no tensor in it has that many: have collate_fn return "
            "tensors with the samples in the first dimension, or leave out pad_batches"
        )
    return result


def rows_in(value: Any) -> Rows | None:
    """Return the marks of the tensors in a batch or call; None if no tensor is marked.

    Raise UserError if they belong to different batches.
    """
    found = {leaf.rows for leaf in leaves_in(value) if isinstance(leaf, PaddedTensor)} - {None}
    if len(found) > 1:
        one, other, *_ = sorted(rows for rows in found if rows is not None)
        raise UserError(
            f"tensors of two padded batches are used together ({one.real} samples in {one.size} rows, {other.real} in "
            f"{other.size}), so the real rows are not known: use one batch at a time"
        )
    return next(iter(found), None)


def without_marks(value: BatchLike) -> BatchLike:
    """Return the same with plain tensors."""
    plain: BatchLike = replace_leaves(value, lambda leaf: _plain(leaf) if isinstance(leaf, PaddedTensor) else leaf)
    return plain


def has_marks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an argument of the call is, or contains, a marked tensor."""
    given = (*args, *kwargs.values())
    if all(type(each) is Tensor for each in given):  # as in most calls: every step of every model comes here
        return False
    return any(isinstance(leaf, PaddedTensor) for leaf in leaves_in(given))


def real_rows(batch: Any) -> int:
    """Return how many rows of a batch are samples. They come first; the others are padding.

    Args:
        batch: A tensor of the batch, or the batch: tensors in any structure.

    Returns:
        The number of samples: all rows, if the batch is not padded.

    Raises:
        UserError: There is no tensor in it, or its tensors belong to different padded batches.

    Example:
        >>> padded = pad_batch(x, 32)
        >>> losses = model(padded).square().mean(1)
        >>> print(losses.shape, losses[: real_rows(padded)].shape)
        torch.Size([32]) torch.Size([8])
    """
    rows = rows_in(batch)
    if rows is not None:
        if own_capture() is not None:
            raise UserError("real_rows gives a number, and replays would keep that of the capture")
        return rows.real
    leaves = leaves_in(batch)
    if not leaves:
        raise UserError("real_rows needs a tensor of the batch, or the batch")
    return rows_of(leaves[0])


def same_rows(new: BatchLike, batch: Any) -> BatchLike:
    """Mark new tensors as rows of a padded batch, so that the engine knows which of their rows are real.

    Use it for tensors that you make of a padded batch by an operation that loses the mark.

    Args:
        new: Tensors in any structure. Row b must still be sample b.
        batch: The padded batch that they were made of.

    Returns:
        `new`, marked if the batch is padded.

    Raises:
        UserError: No tensor in `new` has as many rows as the batch.

    Example:
        >>> padded = pad_batch(x, 32)
        >>> features = torch.from_numpy(padded.numpy() * 2)  # NumPy knows nothing of padding
        >>> print(real_rows(features), real_rows(same_rows(features, padded)))
        32 8
    """
    rows = rows_in(batch)
    return new if rows is None else mark_batch(new, rows)


def pad_batch(batch: BatchLike, size: int) -> BatchLike:
    """Fill a batch up to `size` rows with copies of its first sample, which the engine gives no weight.

    An empty batch is filled up with zeros.

    Args:
        batch: Tensors in any structure. Those with as many rows as the first one are filled up.
        size: Number of rows.

    Returns:
        The batch, marked so that the engine knows its real rows.

    Raises:
        UserError: The batch holds no tensor, or more than `size` rows.

    Example:
        >>> padded_x, padded_y = pad_batch((x, y), 32)
        >>> print(len(padded_x), real_rows(padded_x))
        32 8
    """
    leaves = leaves_in(batch)
    if not leaves:
        raise UserError("pad_batch needs a batch with a tensor in it")
    real = rows_of(leaves[0])
    if real > size:
        raise UserError(f"a batch of {real} samples cannot be padded to {size} rows")
    batch = without_marks(batch)
    return pad_leaves(batch, [leaf for leaf in leaves_in(batch) if rows_of(leaf) == real], Rows(real, size))


def pad_leaves(batch: BatchLike, leaves: Iterable[Leaf], rows: Rows) -> BatchLike:
    """Pad these leaves of the batch: the first `rows.real` of their rows, then copies of their first row."""
    chosen = {id(leaf) for leaf in leaves}
    index = torch.cat([torch.arange(rows.real), torch.zeros(rows.size - rows.real, dtype=torch.long)])

    def pad(leaf: Leaf) -> Leaf:
        if id(leaf) not in chosen:
            return leaf
        if isinstance(leaf, PackedSequence):
            return take(leaf, index, 0)
        if len(leaf) == 0:
            return _mark(leaf.new_zeros((rows.size, *leaf.shape[1:])), rows)
        return _mark(leaf if rows.real == rows.size == len(leaf) else leaf.index_select(0, index.to(leaf.device)), rows)

    padded: BatchLike = replace_leaves(batch, pad)
    return padded


class PaddingCount:
    """Count of rows trained on so far, and of padding among them."""

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
        """Share of padding among all rows; 0 if there were none."""
        return self.padded / self.rows if self.rows else 0.0

    def __str__(self) -> str:
        sizes = ", ".join(f"{count} of {size}" for size, count in sorted(self.sizes.items()))
        return f"padding: {self.share:.1%} of {self.rows} rows; batches: {sizes}"
