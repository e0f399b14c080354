"""One capture: a micro-batch from forward to clipped sums, or a whole step with noise and update, as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash.graphed.settings import Settings, device_of
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
from dpscope.flash.padding.rows import Rows, mark_batch
from dpscope.flash.sample_rows.rehearsed_calls import NotVerified
from dpscope.flash.step.captured import StaticInputs
from dpscope.flash.torch_side.arguments import replace_leaves, tensors_in
from dpscope.flash.torch_side.captures import OwnCapture, capturing, record
from dpscope.random_states import RandomStates

Loss = Callable[..., Tensor]  # of a batch


class CapturedStep:
    """A graph, the tensors that it reads and those that it fills.

    call   (args, kwargs) of the loss, without marks of padding; its tensors are copied for each replay
    base   the captured micro-batch to whose sums this one is added; None if it begins the sums
    whole  whether the micro-batch is a step: then noise and update are in the graph, if the optimizer lets them
    """

    def __init__(
        self,
        optimizer: DPFlashOptimizer,
        loss: Loss,
        call: tuple[Any, Any],
        size: int,
        rows: Rows | None,
        *,
        base: CapturedStep | None,
        whole: bool,
        pool: Any,
    ) -> None:
        self.optimizer, self.engine = optimizer, (engine := optimizer.engine)
        self.size, self.base = size, base
        self.update = optimizer.make_captured_update() if whole else None
        self._call = replace_leaves(call, lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)
        self._static = StaticInputs(engine.clip, size, device_of(engine))
        self._own = OwnCapture(device_of(engine))
        options = engine.rehearsals.options
        before, random_states = options.values(), RandomStates.now()
        with capturing(self._own), engine.capturing(self._static):
            try:
                self._replay, self._loss = record(lambda: self._run(loss, rows), pool)
            except NotVerified:
                raise
            except UserError as refusal:
                raise _not_captured(str(refusal)) from refusal
            except RuntimeError as error:
                raise _not_captured(str(error).partition("\n")[0]) from error
            self._batch = engine.captured()
        if (changed := options.changed_since(before)) is not None:
            raise _not_captured(f"forward changes {changed!r}, which would stay as it is in replays")
        if not random_states.equals(RandomStates.now()):
            raise _not_captured("forward or loss draws random numbers on the CPU, which replays would repeat")
        self._loss_function, self._before = loss, Settings.of(optimizer, loss)

    def _run(self, loss: Loss, rows: Rows | None) -> Tensor:
        args, kwargs = self._call if rows is None else mark_batch(self._call, rows)
        found = loss(*args, **kwargs)
        found.backward()  # type: ignore[no-untyped-call]
        if self.update is None:
            self.engine.accumulate()
        else:
            self.optimizer.capture_update(self.update)
        return found.detach()

    def fits(self) -> bool:
        """Return whether the model, the optimizer and their settings are those of the capture."""
        now = Settings.of(self.optimizer, self._loss_function)
        return now.is_same(self._before) and (self.update is None or self.update.fits())

    def replay(self, call: tuple[Any, Any], rows: Rows | None) -> Tensor:
        """Run the graph on another batch of the same shapes, and the step if it is whole; return its loss."""
        with torch.no_grad():
            for static, given in zip(tensors_in(self._call), tensors_in(call), strict=True):
                static.copy_(given, non_blocking=True)
            self._static.fill(self.size if rows is None else rows.real)
            self.engine.count_replay(self.size, rows)
            if self.update is None:
                self._replay()
            else:
                self.optimizer.replay_update(self.update, self._replay)
            self.engine.take_replayed(self._batch, self.size, rows)
            return self._loss.clone()

    def holds(self, parameter: nn.Parameter, total: Tensor) -> bool:
        """Return whether the sum is the one that this graph fills."""
        return self._batch.sums.get(parameter) is total


def _not_captured(reason: str) -> UserError:
    return UserError(
        f"the step cannot be captured in a CUDA graph ({reason}). Take waits for the device (.item(), print, "
        "if tensor:) and copies from the CPU out of the loss, or train with the ordinary loop"
    )
