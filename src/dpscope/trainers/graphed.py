"""Training steps as CUDA graphs: ordinary ones, captured here, and private ones of `make_graphed_step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dpscope.errors import UserError
from dpscope.flash.torch_side.arguments import replace_leaves, sizes_of, tensors_in
from dpscope.flash.torch_side.captures import record
from dpscope.workloads.workload import Batch

if TYPE_CHECKING:  # it needs Opacus, which ordinary training does not
    from dpscope.flash.graphed.step import GraphedStep

EAGER_STEPS = 3
"""Eager steps before an ordinary step is captured: they make optimizer state and compile kernels."""


def forget_peak(device: torch.device) -> None:
    """Let the allocator's peak be that of the steps to come. Replays allocate nothing, so it is that of the capture."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


class OrdinaryGraph:
    """Ordinary training steps: eager ones first, then one is captured, and further ones replay it.

    The optimizer has to be capturable. Its learning rate is that of the capture.
    """

    def __init__(self, take_step: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> None:
        self._take_step, self._optimizer = take_step, optimizer
        self._eager_steps = 0
        self._graphs: dict[Any, tuple[list[Batch], Callable[[], None], Tensor]] = {}

    def __call__(self, *batches: Batch) -> Tensor:
        key = sizes_of(batches)
        if key not in self._graphs:
            if self._eager_steps < EAGER_STEPS:
                self._eager_steps += 1
                return self._take_step(*batches)
            self._graphs[key] = self._capture(list(batches))
        static, replay, loss = self._graphs[key]
        for kept, given in zip(tensors_in(static), tensors_in(list(batches)), strict=True):
            kept.copy_(given, non_blocking=True)
        replay()
        return loss.clone()

    def _capture(self, batches: list[Batch]) -> tuple[list[Batch], Callable[[], None], Tensor]:
        static = replace_leaves(batches, lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)
        self._optimizer.zero_grad(set_to_none=True)
        forget_peak(tensors_in(static)[0].device)
        try:
            replay, loss = record(lambda: self._take_step(*static))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"the step cannot be captured in a CUDA graph ({reason}): leave out --cuda-graph"
            ) from error
        return static, replay, loss


class PrivateGraph:
    """Private training steps, each a replay. A new shape of batches is warmed up first, without a step."""

    def __init__(self, step: GraphedStep) -> None:
        self._step = step
        self._warm: set[Any] = set()

    def __call__(self, *batches: Batch) -> Tensor:
        for batch in batches:
            if (key := sizes_of(batch)) not in self._warm:
                self._warm.add(key)
                self._step.warm_up(batch)
                self._step.engine.rehearsals.schedule.pause()  # a later look would be an eager step
                forget_peak(next(iter(self._step.engine.parameters)).device)
        losses = [self._replayed(batch, skips=True) for batch in batches[:-1]]
        losses.append(self._replayed(batches[-1], skips=False))
        return torch.stack(losses).mean()

    def _replayed(self, batch: Batch, *, skips: bool) -> Tensor:
        before = self._step.replays
        if skips:
            self._step.optimizer.signal_skip_step(do_skip=True)
        loss = self._step(batch)
        if self._step.replays == before and all(map(Tensor.numel, tensors_in(batch))):  # an empty draw has no graph
            raise UserError(
                "a step did not run as a CUDA graph, as when all samples of its batch are the same: leave out "
                "--cuda-graph"
            )
        return loss
