"""Units of Gram norms: weights with what their per-sample gradients are made of, and the plan of their launches.

A plan is a pure function of what the host sees of the units' tensors: shapes, strides, dtypes, and the last bits of
their pointers. Steps of equal units share it; a step fills in its pointers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpscope.flash.kernels.triton_runtime import TRITON_DTYPES


class GramUnit(NamedTuple):
    """One weight's per-sample gradient Σ_t g_t x_tᵀ.

    gs: each (B, T, p_j), side by side along features. Either xs: each (B, T, d_i), side by side; or ids: (B, T)
    integers, for an embedding: then x_t·x_s is [ids_t = ids_s], and rows with ids = padding_idx count zero.
    `in_tf32`: TF32 holds every value of xs and gs, which are float32.

    Checked where it is used: a step makes hundreds of them.
    """

    gs: tuple[Tensor, ...]
    xs: tuple[Tensor, ...] = ()
    ids: Tensor | None = None
    padding_idx: int | None = None
    in_tf32: bool = False


class UnitKind(NamedTuple):
    """Properties that the units of one launch share. x_dtype: None for ids."""

    length: int
    x_dtype: torch.dtype | None
    g_dtype: torch.dtype
    served: bool  # one dtype a side, which the kernel knows
    aligned: bool  # rows begin on 16-byte words: what tensor descriptors need
    whole: bool  # and end on them: what 16-byte copies need besides
    row_major: bool
    in_tf32: bool


# How many xs and gs a unit has, which come one after the other; the shape of its ids, padding_idx, in_tf32.
UnitForm = tuple[int, int, torch.Size | None, int | None, bool]
Integers = npt.NDArray[np.int64]


class KindPlan(NamedTuple):
    """A launch: the tables of units of one kind, without pointers. See the kernels."""

    kind: UnitKind
    members: list[int]  # units, heavy ones first: the tail of the grid is short
    width: int  # features of all sides of all units
    tensors: list[int]  # of which each segment's pointer is
    segments: Integers  # (segments, 4): pointer, width, stride over samples and over positions
    units: Integers  # (units, 6)


_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


def plan_units(units: Sequence[GramUnit], batch: int) -> tuple[tuple[KindPlan, ...], Integers]:
    """Plan the launches for these units. Return them with the pointers of all tensors."""
    tensors = [tensor for unit in units for side in (unit.xs, unit.gs) for tensor in side]
    pointers = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
    forms = tuple([(len(xs), len(gs), None if ids is None else ids.shape, *others) for gs, xs, ids, *others in units])
    seen = tuple(map(_SHAPE, tensors)), tuple(map(Tensor.stride, tensors)), tuple(map(_DTYPE, tensors))
    return _plan(forms, *seen, (pointers & 15).tobytes(), batch), pointers


@lru_cache(maxsize=256)  # under Poisson sampling steps differ in the number of samples
def _plan(
    forms: tuple[UnitForm, ...],
    shapes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    low_bits: bytes,
    batch: int,
) -> tuple[KindPlan, ...]:
    bits = np.frombuffer(low_bits, dtype=np.int64).tolist()
    seen = list(zip(shapes, strides, dtypes, bits, strict=True))
    found: dict[UnitKind, list[tuple[int, int, list[list[int]]]]] = {}
    first = 0
    for number, form in enumerate(forms):
        after = first + form[0] + form[1]
        kind, segments = _rows_of_unit(form, seen[first:after], batch)
        found.setdefault(kind, []).append((number, first, segments))
        first = after
    return tuple(_plan_kind(kind, members, forms) for kind, members in found.items())


def _plan_kind(
    kind: UnitKind, members: list[tuple[int, int, list[list[int]]]], forms: tuple[UnitForm, ...]
) -> KindPlan:
    members = sorted(members, key=lambda member: -sum(row[1] for row in member[2]))
    rows: list[list[int]] = []
    segments: list[list[int]] = []
    tensors: list[int] = []
    for number, first_tensor, own in members:
        xs, gs, ids, padding_idx, _ = forms[number]
        first = len(segments)
        x_width, g_width = sum(row[1] for row in own[:xs]), sum(row[1] for row in own[xs:])
        if ids is not None:
            rows.append([0, -1 if padding_idx is None else padding_idx, first, gs, 0, g_width])
        else:
            rows.append([first, xs, first + xs, gs, x_width, g_width])
        segments += own
        tensors += range(first_tensor, first_tensor + xs + gs)
    table = np.array(segments, dtype=np.int64)
    chosen = [number for number, *_ in members]
    return KindPlan(kind, chosen, int(table[:, 1].sum()), tensors, table, np.array(rows, dtype=np.int64))


def _rows_of_unit(
    form: UnitForm, seen: list[tuple[torch.Size, tuple[int, ...], torch.dtype, int]], batch: int
) -> tuple[UnitKind, list[list[int]]]:
    """Check the unit's shapes and return its kind and segments."""
    n_xs, n_gs, ids, _, in_tf32 = form
    if not n_gs or bool(n_xs) == (ids is not None):
        raise ValueError("a GramUnit needs gs and either xs or ids")
    (g_batch, length, *_), _, g_dtype, _ = seen[n_xs]
    if g_batch != batch:
        raise ValueError(f"units must share the batch size, got {batch} and {g_batch}")
    if ids is not None and ids != (batch, length):
        raise ValueError(f"expected ids of shape {(batch, length)}, got {tuple(ids)}")
    x_dtype = seen[0][2] if n_xs else None
    served = g_dtype in TRITON_DTYPES and (x_dtype is None or x_dtype in TRITON_DTYPES)
    row_major, apart, bits, ends = True, True, 0, 0
    segments: list[list[int]] = []
    for number, (shape, stride, dtype, low_bits) in enumerate(seen):
        if len(shape) != 3 or shape[:2] != (batch, length):
            raise ValueError(f"expected (B, T, features) with B, T = {(batch, length)}, got {tuple(shape)}")
        width, (stride_b, stride_t, stride_f) = shape[2], stride
        served = served and dtype == (x_dtype if number < n_xs else g_dtype)
        segments.append([0, width, stride_b, stride_t])
        bits |= low_bits | (stride_b | stride_t) * dtype.itemsize
        ends |= width * dtype.itemsize
        row_major = row_major and stride_f == 1
        apart = apart and stride_t >= width and stride_b != 0
    aligned = row_major and apart and bits % 16 == 0
    whole = aligned and ends % 16 == 0
    return UnitKind(length, x_dtype, g_dtype, served, aligned, whole, row_major, in_tf32), segments
