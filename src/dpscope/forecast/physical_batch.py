"""The largest physical batch for a training loop, found by trying forward and backward passes on the GPU at hand."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from dpscope.errors import UserError
from dpscope.forecast.search import search_batch
from dpscope.random_states import random_states_kept
from dpscope.units import format_bytes

MARGIN = 0.05
# Tensors of a parameter's size that an optimizer makes in its first step.
_STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "RMSprop": 1, "Adagrad": 0}


_NO_ROOM = re.compile("CUDA out of memory|STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class DeviceMemory:
    """Memory that torch may use, in bytes, and its peak since `begin`."""

    limit: Callable[[], int]
    begin: Callable[[], None]
    peak: Callable[[], int]
    give_back: Callable[[], None]


def find_physical_batch(
    step: Callable[[Any], Tensor],
    batch: Any,
    *,
    optimizer: Optimizer,
    most: int = 4096,
    margin: float = MARGIN,
    memory: DeviceMemory | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Find the largest physical batch that trains on this GPU, for `BatchMemoryManager`.

    Forward and backward passes of growing batches are tried; no optimizer step is taken, so that parameters, noise,
    random numbers and the accountant are as before. Running out of memory in a trial leaves the process usable.

    Args:
        step: Takes a batch and returns its loss, as the training loop computes it before `loss.backward()`.
        batch: A few real samples: tensors in any structure whose first dimension is the sample. They are repeated.
        optimizer: The private optimizer of `make_private`.
        most: The largest batch to look for, such as the logical batch.
        margin: The share of the GPU's memory to leave free.
        memory: Memory counters of another device than CUDA.
        say: Called with a line about each trial, and about what was found and left free: `say=print`.

    Returns:
        The number of samples.

    Raises:
        UserError: Not even one sample fits, or the device does not count memory.

    Example:
        >>> def step(batch):
        ...     return loss_fn(model(batch[0]), batch[1])
        >>> size = dpscope.find_physical_batch(step, (x, y), optimizer=optimizer)  # doctest: +SKIP
    """
    if not 0 <= margin < 1:
        raise UserError(f"margin must be a share between 0 and 1, not {margin}")
    memory = memory or _cuda_memory(batch)
    states, sums = _states_to_come(optimizer), _trained_bytes(optimizer)  # sums: of gradients, between passes of a step
    allowed = int(memory.limit() * (1 - margin)) - states - sums

    def peak_of(size: int) -> int | None:
        with random_states_kept(list(_gpus_of(batch))):
            peak = _trial(step, batch, size, optimizer, memory)
        took = "ran out of memory" if peak is None else f"took {format_bytes(peak)}"
        say(f"a batch of {size} {took}, and {format_bytes(allowed)} are allowed")
        return None if peak is None or peak > allowed else peak

    largest, _ = search_batch(peak_of, allowed, most)
    if not largest:
        raise UserError(
            "not even one sample fits into this GPU's memory: checkpoint blocks, train adapters, or use a larger card"
        )
    say(
        f"physical batch: {largest}. {margin:.0%} of {format_bytes(memory.limit())} are left free, and "
        f"{format_bytes(states + sums)} for the optimizer's states and sums of gradients."
    )
    return largest


def _gpus_of(batch: Any) -> set[torch.device]:
    return {leaf.device for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.is_cuda}


def _trial(
    step: Callable[[Any], Tensor], batch: Any, size: int, optimizer: Optimizer, memory: DeviceMemory
) -> int | None:
    """Return the bytes at the peak of one forward and backward pass; None if memory does not suffice."""
    memory.begin()
    try:
        step(_repeated(batch, size)).mean().backward()  # type: ignore[no-untyped-call]
        return memory.peak()
    except RuntimeError as error:  # cuBLAS and cuDNN have sentences of their own for it
        if not isinstance(error, torch.OutOfMemoryError) and not _NO_ROOM.search(str(error)):
            raise
        return None
    finally:
        optimizer.zero_grad(set_to_none=True)
        memory.give_back()


def _repeated(batch: Any, size: int) -> Any:
    """Return the samples of a batch, repeated or cut to a size."""
    return tree_map_only(
        Tensor, lambda leaf: leaf[torch.arange(size, device=leaf.device) % len(leaf)] if leaf.dim() else leaf, batch
    )


def _states_to_come(optimizer: Optimizer) -> int:
    """Return the bytes that the first update will allocate."""
    plain = getattr(optimizer, "original_optimizer", optimizer)
    if plain.state:
        return 0
    copies = _STATES.get(type(plain).__name__, int(any(group.get("momentum") for group in plain.param_groups)))
    return copies * _trained_bytes(optimizer)


def _trained_bytes(optimizer: Optimizer) -> int:
    return sum(p.nbytes for group in optimizer.param_groups for p in group["params"] if p.requires_grad)


def _cuda_memory(batch: Any) -> DeviceMemory:
    device = next(iter(_gpus_of(batch)), None)
    if device is None:
        raise UserError("memory is counted on CUDA alone: give a batch that lies on a GPU, or a batch size of your own")

    def give_back() -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def limit() -> int:
        give_back()
        free, total = torch.cuda.mem_get_info(device)
        share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(device)  # torch 2.8
        return int(min(free + torch.cuda.memory_reserved(device), share * total))

    return DeviceMemory(
        limit,
        lambda: torch.cuda.reset_peak_memory_stats(device),
        lambda: int(torch.cuda.max_memory_reserved(device)),
        give_back,
    )
