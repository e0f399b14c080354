"""Taps on the root: where a forward pass begins, and where gradients are cleared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash.sample_rows.proxy import NotFollowed
from dpscope.flash.taps.taps import Engine, EngineTap
from dpscope.flash.torch_side.frames import run_outside


class CompiledRegion(Protocol):
    """Something that is compiled, called with capture leaves for its taps (compiled/regions.py)."""

    eager: Callable[..., Any]

    def entered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]: ...


class RootTap(EngineTap):
    """The root's forward: tells the engine that a pass begins, and with how many samples."""

    region: CompiledRegion  # of a model that is compiled after it was made private
    entered = False  # in a graph: whether `run` has begun the pass outside of it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            if self.entered or not torch.is_grad_enabled():
                return self.original(*args, **kwargs)
            return run_outside(self, args, kwargs)
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        return self.run(None, self.original, args, kwargs)

    def run_compiled(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.run(self.region, forward, args, kwargs)

    def run(
        self,
        region: CompiledRegion | None,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a pass of the model. `forward`: the model's own, or the compiled region of it."""
        clear_what_is_compiled()

        def in_region(*args: Any, **kwargs: Any) -> Any:
            assert region is not None
            if not self.engine.forwards.size():  # an empty batch
                return region.eager(*args, **kwargs)
            before, self.entered = self.entered, True
            try:
                with region.entered(args, kwargs):
                    return forward(*args, **kwargs)
            finally:
                self.entered = before

        try:
            if region is None:
                return self.engine.forwards.call_root(forward, args, kwargs)
            return self.engine.forwards.call_root(region.eager, args, kwargs, compiled=in_region)
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


def clear_what_is_compiled() -> None:
    """Make `torch.compile(model).zero_grad()` call the model's own, which may be a `ZeroGradTap`.

    torch's wrapper clears the same parameters, and may be put around a model at any time after it was made private.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None and "zero_grad" not in vars(compiler.OptimizedModule):
        compiler.OptimizedModule.zero_grad = _zero_grad_of_the_original


def _zero_grad_of_the_original(compiled: Any, set_to_none: bool = True) -> None:
    compiled._orig_mod.zero_grad(set_to_none)
