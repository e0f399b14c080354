"""Units of Gram norms: weights with what their per-sample gradients are made of, and what units of one launch share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dpscope.flash.kernels.triton_runtime import TRITON_DTYPES


class GramUnit(NamedTuple):
    """One weight's per-sample gradient Σ_t g_t x_tᵀ.

    gs: each (B, T, p_j), side by side along features. Either xs: each (B, T, d_i), side by side; or ids: (B, T)
    integers, for an embedding: then x_t·x_s is [ids_t = ids_s], and rows with ids = padding_idx count zero.

    Checked where it is used: a step makes hundreds of them.
    """

    gs: tuple[Tensor, ...]
    xs: tuple[Tensor, ...] = ()
    ids: Tensor | None = None
    padding_idx: int | None = None


class UnitKind(NamedTuple):
    """What units of one launch have in common. x_dtype: None for ids."""

    length: int
    x_dtype: torch.dtype | None
    g_dtype: torch.dtype
    served: bool  # one dtype a side, which the kernel knows
    aligned: bool  # rows begin on 16-byte words: what tensor descriptors need
    whole: bool  # and end on them: what 16-byte copies need besides
    row_major: bool


class UnitRows(NamedTuple):
    """A unit as the table's integers: pointer, width, stride over samples and over positions of each tensor."""

    width: int  # features of both sides together: what one tile costs, up to a factor
    segments: list[int]
    unit: GramUnit


def rows_of_unit(unit: GramUnit, batch: int) -> tuple[UnitKind, UnitRows]:
    """One pass over the unit's tensors, which also checks their shapes: this runs on the host in every step."""
    gs, xs, ids, _ = unit
    if not gs or bool(xs) == (ids is not None):
        raise ValueError("a GramUnit needs gs and either xs or ids")
    if gs[0].shape[0] != batch:
        raise ValueError(f"units must share the batch size, got {batch} and {gs[0].shape[0]}")
    length = gs[0].shape[1]
    if ids is not None and ids.shape != (batch, length):
        raise ValueError(f"expected ids of shape {(batch, length)}, got {tuple(ids.shape)}")
    g_dtype = gs[0].dtype
    x_dtype = xs[0].dtype if xs else None
    served = g_dtype in TRITON_DTYPES and (x_dtype is None or x_dtype in TRITON_DTYPES)
    row_major, apart, bits, ends, total = True, True, 0, 0, 0
    segments: list[int] = []
    for side, dtype in ((xs, x_dtype), (gs, g_dtype)):
        size = 0 if dtype is None else dtype.itemsize
        for tensor in side:
            shape = tensor.shape
            if len(shape) != 3 or shape[0] != batch or shape[1] != length:
                raise ValueError(f"expected (B, T, features) with B, T = {(batch, length)}, got {tuple(shape)}")
            if tensor.dtype != dtype:
                served = False
            stride_b, stride_t, stride_f = tensor.stride()
            width = shape[2]
            pointer = tensor.data_ptr()
            segments += (pointer, width, stride_b, stride_t)
            total += width
            bits |= pointer | (stride_b | stride_t) * size
            ends |= width * size
            if stride_f != 1:
                row_major = False
            if stride_t < width or stride_b == 0:
                apart = False
    aligned = row_major and apart and bits % 16 == 0
    whole = aligned and ends % 16 == 0
    return UnitKind(length, x_dtype, g_dtype, served, aligned, whole, row_major), UnitRows(total, segments, unit)
