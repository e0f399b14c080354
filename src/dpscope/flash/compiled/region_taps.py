"""Taps on the root, and on modules around the model or inside it that torch.compile has wrapped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash.compiled.regions import CallShapes, Region
from dpscope.flash.sample_rows.proxy import NotFollowed
from dpscope.flash.taps.recorder import Engine
from dpscope.flash.taps.taps import EngineTap
from dpscope.flash.torch_side.attributes import temporarily
from dpscope.flash.torch_side.frames import is_wrapper, original_of, outside_graphs, set_callback, skip_frame
from dpscope.flash.torch_side.instance_method import instance_method
from dpscope.flash.torch_side.torch_version import require_for_compiled

COMPILE_FIRST = (
    "the model was compiled after it was made private, and what counts its samples runs between graphs: for "
    "fullgraph=True call torch.compile first, then make_private"
)


class RootTap(EngineTap):
    """The root's forward, which may be compiled at any time: it tells that a pass begins, and with how many samples."""

    entered = False  # in a graph: whether the pass has begun outside of it

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(engine, name, module)
        self.region = Region(engine, self.original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        in_graph = torch.compiler.is_compiling()
        if not torch.is_grad_enabled() or (in_graph and self.entered):
            return self.original(*args, **kwargs)
        if in_graph:
            return run_outside(self, args, kwargs)
        if torch._C._functorch.maybe_current_level() is not None:  # torch.func around the model: nothing accumulates
            with self.engine.without_taps():
                return self.module.forward(*args, **kwargs)
        return self.run(self.original, args, kwargs)

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        instead: Callable[..., Any] | None = None,
    ) -> Any:
        """Run a pass of the model. `instead`: what is called in place of its forward."""
        _clear_what_is_compiled()
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

    def run_region(
        self, region: Region, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a pass of the model by the compiled forward of a region that is the whole model."""

        def in_region(*args: Any, **kwargs: Any) -> Any:
            if not self.engine.forwards.size():  # an empty batch
                return region.eager(*args, **kwargs)
            with temporarily(self, entered=True), region.entered(args, kwargs):
                return forward(*args, **kwargs)

        require_for_compiled()
        return self.run(region.eager, args, kwargs, instead=in_region)


def _clear_what_is_compiled() -> None:
    """Make `torch.compile(model).zero_grad()` call the model's own, which may be a `ZeroGradTap`.

    torch's wrapper clears the same parameters, and may be put around a model at any time after it was made private.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None and "zero_grad" not in vars(compiler.OptimizedModule):
        compiler.OptimizedModule.zero_grad = lambda self, set_to_none=True: self._orig_mod.zero_grad(set_to_none)


class ZeroGradTap(EngineTap):
    """The root's zero_grad, which also drops records of backward passes that were not summed.

    The sums of a logical batch that is not complete are kept, as the optimizer's zero_grad keeps them.
    """

    attribute = "zero_grad"

    def __init__(self, engine: Engine, module: nn.Module) -> None:
        super().__init__(engine, "", module)
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


class RegionTap(EngineTap):
    """Tap on the forward of the module that torch.compile(module) returns."""

    runs_eagerly = False  # in a module that runs sample by sample, and its checkpoints that run again in backward

    def __init__(self, engine: Engine, name: str, module: nn.Module, root: RootTap) -> None:
        super().__init__(engine, name, module)
        require_for_compiled()
        inner = original_of(module)
        self.root = root if inner is engine.model else None
        self.region = Region(engine, inner._call_impl)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plans = isinstance(self.engine.recorder, CallShapes)
        if torch.compiler.is_compiling() or plans or self.engine.forwards.in_trial or self.runs_eagerly:
            return self.region.eager(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        if self.root is not None:
            return self.root.run_region(self.region, self.original, args, kwargs)
        if not self.engine.forwards.size():  # an empty batch, or outside of the model's forward
            return self.region.eager(*args, **kwargs)
        with self.region.entered(args, kwargs):
            return self.original(*args, **kwargs)


class CompiledCallTap(RegionTap):
    """Tap on the call that module.compile() puts in place of the module's own."""

    attribute: ClassVar[str] = "_compiled_call_impl"


def region_taps(engine: Engine, given: nn.Module, root: RootTap) -> list[RegionTap]:
    """Return taps for compiled parts, around the model (`given`) and inside it, that have none yet."""
    found = []
    for name, module in given.named_modules():
        kind = RegionTap if is_wrapper(module) else CompiledCallTap
        if vars(module).get(kind.attribute) is not None and instance_method(module, kind.attribute) is None:
            found.append(kind(engine, name, module, root))
    return found


# -- the root's forward as one frame -----------------------------------------------------------------------------------


def _run_outside(tap: RootTap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the tap's work uncompiled. The forward inside it is compiled as one frame.

    Called where torch.compile looks at every new frame, and itself skipped by it. Until the callback is restored, this
    calls only C functions and the frame that is to be compiled.
    """
    assert set_callback is not None
    callback = set_callback(None)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        set_callback(callback)
        try:
            return _forward_frame(tap.original, args, kwargs)
        finally:
            set_callback(None)

    try:
        return tap.run_region(tap.region, compiled, args, kwargs)
    finally:
        set_callback(callback)


def _forward_frame(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call forward in a frame of dpscope: torch.compile begins no graph in frames of torch's own modules."""
    return forward(*args, **kwargs)


@outside_graphs(COMPILE_FIRST)
def _run_eagerly(tap: RootTap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tap.run_region(tap.region, tap.original, args, kwargs)


_run_outside._torchdynamo_disable_msg = COMPILE_FIRST  # type: ignore[attr-defined]  # what torch.compile shows

# In a version of torch that does not let it be set, the forward runs as it is: exact, and not compiled.
run_outside = _run_eagerly if set_callback is None else skip_frame(_run_outside)
