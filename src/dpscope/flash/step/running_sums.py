"""The clipped sums of the micro-batches of a step, between two clearings.

They belong to the engine: nothing of them is in p.grad until `hand_out`, so whatever a training loop does to gradients
in between (clipping, scaling, clearing) changes nothing. They are float32 even for half-precision parameters, because
rounded sums of two neighbouring batches may differ by more than C.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from dpscope.errors import UserError
from dpscope.flash.gradients.contributions import wide
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.torch_side.attributes import temporarily
from dpscope.flash.torch_side.shards import as_part_of, local


class RunningSums:
    def __init__(self, slots: Iterable[Slot]) -> None:
        self._names = {slot.parameter: slot.name for slot in slots}
        self._held: dict[nn.Parameter, Tensor] = {}
        self._written: dict[nn.Parameter, TensorWeakRef] = {}  # gradients that were made here
        self._warned = False

    def __bool__(self) -> bool:
        return bool(self._held)

    def get(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the sum so far; of a sharded parameter, this rank's part."""
        return self._held.get(parameter)

    def put(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Hold the first sum of a parameter; later ones are added into what `get` returns."""
        self._held[parameter] = total.to(wide(parameter.dtype))

    def of(self, parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
        """Return those of the parameters that have a sum, and the sum."""
        return [(parameter, self._held[parameter]) for parameter in parameters if parameter in self._held]

    def items(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """Yield every parameter that has a sum, and the sum."""
        return self._held.items()

    def kept(self) -> AbstractContextManager[None]:
        """Restore the earlier sums at the end of the block."""
        return temporarily(self, _held=dict(self._held))

    def held(self) -> Iterable[tuple[str, Tensor]]:
        """Return name and sum of every parameter that has one."""
        return ((self._names[parameter], total) for parameter, total in self._held.items())

    def hand_out(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Add the sums to p.grad of these parameters (default: all), rounded to their dtype; drop all others.

        A gradient that already exists must come from this class: any other may hold more than C of a sample.
        """
        for parameter in list(self._held) if parameters is None else parameters:
            total = self._held.pop(parameter, None)
            if total is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient = as_part_of(parameter, total.to(parameter.dtype))
                self._written[parameter] = TensorWeakRef(gradient)
            else:
                local(parameter.grad).add_(total)
        self._held.clear()

    def refuse_other_gradients(self) -> None:
        """Raise UserError if a gradient was not made here: it may hold more than C of a sample."""
        for parameter, name in self._names.items():
            if parameter.grad is not None and not self._wrote(parameter):
                raise UserError(
                    f"{name}.grad holds a gradient that flash clipping did not make: clear gradients with "
                    "optimizer.zero_grad() first"
                )

    def ignore_gradients(self) -> None:
        """Drop every p.grad before the private gradient is written; warn once if it was not made here."""
        for parameter, name in self._names.items():
            if parameter.grad is None:
                continue
            if not self._warned and not self._wrote(parameter):
                self._warned = True
                warnings.warn(
                    f"{name}.grad was set by the training loop and is ignored, because clipped sums stay inside the "
                    "engine until noise is added. Remove clip_grad_norm_ and other changes of .grad",
                    stacklevel=4,
                )
            parameter.grad = None

    def clear(self, set_to_none: bool = True) -> None:
        """Drop all sums. Set p.grad to None, or to zero if it was made here and `set_to_none` is False."""
        self._held.clear()
        for parameter in self._names:
            if parameter.grad is not None:
                if set_to_none or not self._wrote(parameter):
                    parameter.grad = None
                else:
                    parameter.grad.zero_()

    def _wrote(self, parameter: nn.Parameter) -> bool:
        reference = self._written.get(parameter)
        return reference is not None and reference() is parameter.grad
