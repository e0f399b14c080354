"""Outputs of two runs compared: by rows, by elements, with the tolerance of their dtype."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.dry_run import read

SLICE = 2**22
"""Elements of outputs that are compared at a time."""

# How far other rows may move, of the largest element: another kernel may be chosen for another batch (a mask that has
# become all ones), which rounds differently.
_ROW_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_ROW_TOLERANCE = 5e-2
_REPEATED = {torch.float64: 1e-13}  # of the largest element: two runs on the same samples
_REPEATED_ROUNDED = 1e-7  # in other dtypes


def apart_from(a: Tensor, b: Tensor, dim: int, rows: Tensor, *, share: float | None = None) -> bool:
    """Return whether these rows differ by more than rounding, or by more than a share of the largest element."""
    if _is_equal(a, b, dim, rows):
        return False
    if not a.is_floating_point():
        return dry_run.current() is None
    share = _ROW_TOLERANCE.get(a.dtype, _HALF_ROW_TOLERANCE) if share is None else share
    tolerance = share * max(map(largest, slices(a, dim, rows)), default=0.0)
    return any(
        not read(((x - y).abs() <= tolerance).logical_or(x.isnan() & y.isnan()).logical_or(x == y).all(), True)
        for x, y in zip(slices(a, dim, rows), slices(b, dim, rows), strict=True)
    )


def _is_equal(a: Tensor, b: Tensor, dim: int, rows: Tensor) -> bool:
    """Return whether these rows are the same to the bit; False if they hold NaN, or in a dry run."""
    parts = zip(slices(a, dim, rows), slices(b, dim, rows), strict=True)
    return dry_run.current() is None and a.dtype == b.dtype and all(torch.equal(x, y) for x, y in parts)


def any_apart(first: list[Tensor], second: list[Tensor], rows: int, *, repeated: bool = False) -> bool:
    """Return whether the rows of any output differ between two runs on the same samples; `repeated`: at all."""
    whole = torch.arange(rows)
    for before, after in zip(first, second, strict=False):
        share = _REPEATED.get(before.dtype, _REPEATED_ROUNDED) if repeated else None
        dim = next((dim for dim, size in enumerate(before.shape) if size == rows), None)
        if dim is not None and before.shape == after.shape and apart_from(before, after, dim, whole, share=share):
            return True
    return False


def common_parts(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what two outputs both have: all of it, or if sizes differ, the first and the last elements."""
    if a.shape == b.shape:
        yield a, b
        return
    sizes = list(map(min, a.shape, b.shape))
    first = tuple(slice(size) for size in sizes)
    last = tuple(slice(-size, None) if size else slice(0) for size in sizes)
    yield a[first], b[first]
    yield a[last], b[last]


def dim_of_samples(few: Tensor, many: Tensor, fewer: int, rows: int) -> int | None:
    """Return the first dimension with an entry for each sample: it has `rows` entries, and `fewer` for fewer."""
    if few.dim() != many.dim():
        return None
    both = enumerate(zip(few.shape, many.shape, strict=True))
    return next((dim for dim, sizes in both if sizes == (fewer, rows)), None)


def no_part_depends_on_both(plain: Tensor, first: Tensor, last: Tensor, dim: int) -> bool:
    """Return whether no part along `dim` depends on both the first and the last sample."""
    of_first, of_last = (
        (other.nan_to_num() != plain.nan_to_num()).movedim(dim, 0).flatten(1).any(1)
        if plain.dim() > 1
        else other.nan_to_num() != plain.nan_to_num()
        for other in (first, last)
    )
    return not read((of_first & of_last).any(), False)


def largest(output: Tensor) -> float:
    if not output.numel() or not output.is_floating_point():
        return 0.0
    parts = torch.split(output.reshape(-1), SLICE)  # copies of whole outputs would be the peak of verification
    return max(float(read(part.abs().nan_to_num(0).amax(), 0.0)) for part in parts)


def largest_difference(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return max|found − wanted| and max|wanted| in float64, a slice at a time, because copies of logits are large."""
    apart = size = 0.0
    whole = torch.arange(1)
    if _is_equal(found[None], wanted[None], 0, whole):
        return 0.0, 0.0
    for mine, other in zip(slices(found[None], 0, whole), slices(wanted[None], 0, whole), strict=True):
        if other.numel():
            apart = max(apart, read((mine.double() - other.double()).abs().nan_to_num(0).amax(), 0.0))
            size = max(size, read(other.double().abs().nan_to_num(0, 0, 0).amax(), 0.0))
    return apart, size


def slices(tensor: Tensor, dim: int, rows: Tensor) -> Iterator[Tensor]:
    """Yield these rows, `SLICE` elements at a time: what compares logits whole holds more than a step does."""
    most = max(1, SLICE // max(1, tensor.numel() // max(1, tensor.shape[dim])))
    for group in [rows] if len(rows) <= most else torch.split(rows, most):
        part = tensor.select(dim, int(group)) if len(group) == 1 else tensor.index_select(dim, group.to(tensor.device))
        yield from [part] if part.numel() <= SLICE else torch.split(part.reshape(-1), SLICE)


def is_coarse(tensor: Tensor) -> bool:
    """Return whether products that lead to the tensor may be rounded to less than its dtype: autocast, TF32."""
    reads_tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    return torch.is_autocast_enabled(tensor.device.type) or (tensor.is_cuda and reads_tf32)
