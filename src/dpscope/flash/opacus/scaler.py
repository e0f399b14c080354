"""Loss scaling for float16: torch's GradScaler, aware that flash clipping norms gradients while they are scaled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from dpscope.errors import UserError
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer


class GradScaler(torch.amp.GradScaler):
    """torch's loss scaler for float16, for private optimizers.

    Each micro-batch is clipped with the scale that its loss had, so nothing is left to unscale. A sample that overflows
    is left out of its step and counted. No step is skipped; the scale is lowered after it.

    Args:
        *args: Arguments of `torch.amp.GradScaler`, such as the device.
        optimizer: The private optimizer of `make_private`.
        **kwargs: Arguments of `torch.amp.GradScaler` by name.

    Raises:
        UserError: The optimizer is not private.

    Example:
        >>> model, private, loader = PrivacyEngine().make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader,
        ...     noise_multiplier=1.0, max_grad_norm=1.0
        ... )
        >>> scaler = GradScaler("cpu", optimizer=private)
        >>> scaler.scale(loss_fn(model(x), y)).backward()
        >>> scaler.step(private)
        >>> scaler.update()
    """

    def __init__(self, *args: Any, optimizer: Optimizer | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._private: dict[int, DPFlashOptimizer] = {}
        self._seen: dict[int, Tensor | None] = {}  # overflows up to the last update
        if optimizer is not None:
            self.attach(optimizer)

    def attach(self, optimizer: Optimizer) -> None:
        """Scale the losses of this private `optimizer` from now on. Call it before the first `scale`."""
        if not isinstance(optimizer, DPFlashOptimizer):
            raise UserError(f"a private optimizer is attached, not {type(optimizer).__name__}: attach make_private's")
        self._private[id(optimizer)] = optimizer
        self._seen[id(optimizer)] = optimizer.engine.nonfinite_samples

    def scale(self, outputs: Any) -> Any:
        scaled = super().scale(outputs)
        if self.is_enabled():
            scale = self._get_scale_async()
            assert scale is not None  # made by now
            for optimizer in self._private.values():
                optimizer.engine.loss_scale = scale.clone()  # update() changes it in place
        return scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Close the micro-batch. Its clipped sums are unscaled, and stay inside the engine until the step."""
        if not isinstance(optimizer, DPFlashOptimizer) or not self.is_enabled():
            super().unscale_(optimizer)
            return
        state = self._state_of(optimizer)
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() or step() has already been called on this optimizer since the last update()")
        optimizer.draw_goes_on()  # refuses a draw that an error has ended, and drops the sums of one that was left
        optimizer.clip_and_accumulate()
        self._note_overflows(optimizer, state)
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if not isinstance(optimizer, DPFlashOptimizer) or not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update()")
        result = optimizer.step(*args, **kwargs)
        self._note_overflows(optimizer, state)
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(new_scale)
        for key, optimizer in self._private.items():
            self._seen[key] = optimizer.engine.nonfinite_samples
            if not optimizer.engine.pending:  # else its scale is still needed
                optimizer.engine.loss_scale = 1.0

    def _state_of(self, optimizer: DPFlashOptimizer) -> dict[str, Any]:
        if id(optimizer) not in self._private:
            raise UserError(
                "the loss was scaled without the optimizer's knowledge: use GradScaler(optimizer=optimizer)"
            )
        if self._get_scale_async() is None:
            raise UserError("the loss was not scaled: call scaler.scale(loss).backward() first")
        state: dict[str, Any] = self._per_optimizer_states[id(optimizer)]
        return state

    def _note_overflows(self, optimizer: DPFlashOptimizer, state: dict[str, Any]) -> None:
        """Note overflows where torch's update() reads them. Wait for no device."""
        before, after = self._seen[id(optimizer)], optimizer.engine.nonfinite_samples
        scale = self._get_scale_async()
        assert scale is not None  # _state_of saw it
        count = torch.zeros_like(scale) if after is None else after if before is None else after - before
        state["found_inf_per_device"] = {scale.device: (count > 0).to(scale)}
