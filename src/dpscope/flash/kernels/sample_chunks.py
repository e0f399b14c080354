"""Launches of kernels that add up something of each sample: chunks of tensors, all tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpscope.flash.kernels.tensor_lists import Cut, list_launches
from dpscope.flash.kernels.triton_runtime import Backend, launch_on
from dpscope.vocabulary.families import CLIPPING
from dpscope.vocabulary.launches import Launch, announce

SAMPLE_CUT = Cut(chunk=32768, block=8192)
"""A block is 64 bytes of bfloat16 a thread: four loads of 16 bytes in flight."""


def add_sums_of_chunks(
    kernel: Any, values: Sequence[Tensor], starts: Sequence[int], total: Tensor, *more: int, backend: Backend
) -> list[int]:
    """Add the results of `kernel` on contiguous tensors (B, …) to `total`, (…, B) float64; return the others.

    The kernel gets the arguments of a list of tensors (`tensor_lists`), the number of chunks, its partial sums
    (…, B, chunks), and `more`. `starts`: a number for each tensor.
    """
    batch = total.shape[-1]
    launches, left = list_launches(
        [list(values)], list(starts), 0, 0, backend, stacked=0, samples=batch, cut=SAMPLE_CUT
    )
    for launch in launches:
        partials = torch.empty((*total.shape, launch.programs), dtype=torch.float64, device=total.device)
        with launch_on(total.device):
            kernel[(launch.programs * batch,)](
                *launch.arguments,
                launch.programs,
                partials,
                *more,
                DTYPE=launch.dtypes[0],
                ALIGNED=launch.aligned,
                **launch.cut,
                num_warps=8,
            )
        read = [values[i] for i in launch.members]
        announce(partial(Launch, name=kernel.__name__, family=CLIPPING, reads=read, writes=[partials]))
        total += partials.sum(-1)
    return left
