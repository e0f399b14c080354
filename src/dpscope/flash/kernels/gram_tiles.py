"""Tiles of a launch of Gram norms: their sizes, and which of them meet or lie below the diagonal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpscope.flash.kernels.gram_units import UnitKind
from dpscope.flash.kernels.triton_runtime import is_hopper, table_on
from dpscope.flash.torch_side.captures import device_cache


@dataclass(frozen=True)
class GramTiles:
    """Tile sizes of a launch. block_s is a multiple of block_t.

    `tma`: tiles are read through tensor descriptors if rows are aligned.
    """

    block_t: int
    block_s: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool


def choose_tiles(kind: UnitKind, device: torch.device) -> GramTiles:
    """Choose the tiles of a launch, as measured on an H200 (bench_gram_norms.py, 2026-11-15) for layers of preset 1b.

    Half precision: 128×128×64, 8 warps, 4 stages, descriptors take 2.04 ms at B=16, T=256 (64×128×128: 2.9 ms) and
    22.7 ms at B=16, T=1024. float32, one unit of 2048 and 2048 features at B=8, T=1024: 64×64×32 with 4 warps and 3
    stages takes 0.53 ms, 128×64 0.60, 128×128 0.68, cuBLAS without tf32 1.23 (2026-11-15). The other choices are not
    measured: shorter samples use smaller tiles, and devices without descriptors or tensor cores use what fits.
    """
    hopper = is_hopper(device)
    tma = hopper and kind.aligned
    if kind.in_tf32 and hopper:
        return GramTiles(128, 128, 32, 8, 4, tma)
    if torch.float32 in (kind.x_dtype, kind.g_dtype):
        return GramTiles(64, 64, 32, 4, 3, tma)
    if kind.length <= 64:
        return GramTiles(64, 64, 64, 4, 3, tma)
    if not hopper:
        return GramTiles(128, 128, 32, 8, 3, tma=False)
    return GramTiles(128, 128, 64, 8, 4, tma)


@device_cache(64)
def tile_table_of(length: int, block_t: int, block_s: int, device: torch.device) -> tuple[Tensor, int]:
    """Return (i, j) of every tile that holds some t >= s, flat (i0, j0, i1, j1, …), and the number of tiles."""
    n_rows, n_cols = -(-length // block_t), -(-length // block_s)
    tiles = [(i, j) for i in range(n_rows) for j in range(n_cols) if (i + 1) * block_t > j * block_s]
    (table,) = table_on(device, [value for tile in tiles for value in tile], wait=True)
    return table, len(tiles)


def is_worth_aligning(kind: UnitKind, device: torch.device) -> bool:
    """Return True if an aligned copy pays off: each row is read T / block_t times, by the copy engine if aligned."""
    return kind.served and not kind.aligned and kind.g_dtype.itemsize == 2 and kind.length >= 128 and is_hopper(device)
