"""Taps on the root: where a forward pass begins, and where gradients are cleared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash.sample_rows.proxy import NotFollowed
from dpscope.flash.taps.recorder import Engine
from dpscope.flash.taps.taps import EngineTap


class RootTap(EngineTap):
    """The root's forward: tells the engine that a pass begins, and with how many samples."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.original, args, kwargs) if torch.is_grad_enabled() else self.original(*args, **kwargs)

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        instead: Callable[..., Any] | None = None,
    ) -> Any:
        """Run a pass of the model. `instead`: what is called in place of its forward."""
        try:
            return self.engine.forwards.call_root(forward, args, kwargs, instead=instead)
        except UserError as refusal:
            if isinstance(refusal, self.engine.refusal):
                raise
            raise self.engine.refusal(str(refusal)) from refusal
        except NotFollowed as end:
            if self.engine.forwards.can_begin_again:
                raise
            raise self.engine.refusal(str(end)) from None


class ZeroGradTap(EngineTap):
    """The root's zero_grad, which also drops records of backward passes that were not summed.

    The sums of a logical batch that is not complete are kept, as the optimizer's zero_grad keeps them.
    """

    attribute = "zero_grad"

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(engine, name, module)
        # torch's own walks over all modules, which takes milliseconds in a large model.
        self.parameters = list(module.parameters()) if type(module).zero_grad is nn.Module.zero_grad else None

    def __call__(self, set_to_none: bool = True) -> None:
        if not self.engine.zero_grad(set_to_none):
            return
        if self.parameters is None or not set_to_none:
            self.original(set_to_none)
            return
        for parameter in self.parameters:
            parameter.grad = None
