"""The clipped sums of the micro-batches of a step, between two clearings.

They are in p.grad. Where noise is added later (`keep_wide`), those of half-precision parameters stay in float32 beside
it until then: rounded sums of two neighbouring batches may differ by more than C.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from dpscope.errors import UserError
from dpscope.flash.contributions import wide
from dpscope.flash.ranks.shards import as_part_of, local
from dpscope.flash.slots import Slot

_GRADIENT = attrgetter("grad")


class RunningSums:
    def __init__(self, slots: Iterable[Slot]) -> None:
        self._names = {slot.parameter: slot.name for slot in slots}
        self._written: dict[nn.Parameter, TensorWeakRef] = {}  # gradients that were made here
        self._wide: dict[nn.Parameter, Tensor] = {}
        self._keeps_wide = False

    def keep_wide(self) -> None:
        """From now on half-precision parameters have their sums in float32 until `write_wide`."""
        self._keeps_wide = True
        self.clear()  # what is in p.grad by now was not clipped, or is rounded

    def _is_wide(self, parameter: nn.Parameter) -> bool:
        return self._keeps_wide and parameter.dtype in (torch.bfloat16, torch.float16)

    def get(self, parameter: nn.Parameter) -> Tensor | None:
        """The sum so far; of a sharded parameter, this rank's part."""
        if self._is_wide(parameter):
            return self._wide.get(parameter)
        return None if parameter.grad is None else local(parameter.grad)

    def are_there(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether one of these parameters has a sum."""
        return bool(self._wide) or any(gradient is not None for gradient in map(_GRADIENT, parameters))

    def put(self, parameter: nn.Parameter, total: Tensor) -> None:
        """The first sum of a parameter; later ones are added into what `get` returns."""
        if self._is_wide(parameter):
            self._wide[parameter] = total.to(wide(parameter.dtype))
        else:
            self._write(parameter, total)

    def write_wide(self, parameters: Iterable[nn.Parameter]) -> None:
        """The float32 sums, private by now, become p.grad of these parameters, rounded; the others are dropped."""
        for parameter in parameters:
            if parameter in self._wide:
                self._write(parameter, self._wide.pop(parameter))
        self._wide.clear()

    def refuse_other_gradients(self) -> None:
        """A gradient that was not made here may hold more than C of a sample."""
        for parameter, name in self._names.items():
            if parameter.grad is not None and not self._wrote(parameter):
                raise UserError(
                    f"{name}.grad holds a gradient that flash clipping did not make: clear gradients with "
                    "optimizer.zero_grad() first"
                )

    def clear(self, set_to_none: bool = True) -> None:
        """p.grad of every parameter of the model: zero where it was made here and is to be kept, None otherwise."""
        self._wide.clear()
        for parameter in self._names:
            if parameter.grad is not None:
                if set_to_none or not self._wrote(parameter):
                    parameter.grad = None
                else:
                    parameter.grad.zero_()

    def _write(self, parameter: nn.Parameter, total: Tensor) -> None:
        parameter.grad = gradient = as_part_of(parameter, total.to(parameter.dtype))
        self._written[parameter] = TensorWeakRef(gradient)

    def _wrote(self, parameter: nn.Parameter) -> bool:
        reference = self._written.get(parameter)
        return reference is not None and reference() is parameter.grad
