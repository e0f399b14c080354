"""Regions: what torch.compile has compiled, the model or modules inside it, called with capture leaves for taps."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash.compiled.capture_leaves import CallPlan, CallShapes, Handout
from dpscope.flash.sample_rows.rehearsal_run import untouched
from dpscope.flash.taps.root_taps import RootTap
from dpscope.flash.taps.taps import Engine, EngineTap, LayerTap
from dpscope.flash.torch_side.arguments import replace_leaves, sizes_of, tensors_in
from dpscope.flash.torch_side.autograd_graph import nodes_behind
from dpscope.flash.torch_side.checkpoint_calls import watching
from dpscope.flash.torch_side.frames import is_wrapper, original_of
from dpscope.flash.torch_side.instance_method import instance_method
from dpscope.flash.torch_side.torch_version import require_for_compiled

# A plan holds a small tensor for each capture leaf of each layer; another one takes an eager run without gradients.
MOST_PLANS = 16


class Region:
    """Compiled part of a model. `eager` is the module that was compiled."""

    def __init__(self, engine: Engine, eager: Callable[..., Any]) -> None:
        self.engine = engine
        self.eager = eager
        self._plans: dict[Any, CallPlan] = {}

    @contextmanager
    def entered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Give the taps of the region capture leaves for one call of it with these arguments."""
        with Handout(self.engine, self._plan(args, kwargs), lambda: self._reached(args, kwargs)).given():
            yield

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        batch = self.engine.forwards.size() or 0
        key = (batch, self.engine.model.training, sizes_of((args, kwargs)), _autocast())
        plan = self._plans.pop(key, None)
        if plan is None:
            run = CallShapes(batch)
            try:
                self._run_shapes(run, args, kwargs)
            except (UserError, torch.OutOfMemoryError):
                raise
            except Exception:  # the compiled call will say what is wrong, if it fails as well
                return CallPlan([])
            plan = CallPlan(run.calls)
            if not run.complete:
                return plan
        self._plans[key] = plan  # the last is the one that was used last; passes hold their own
        if len(self._plans) > MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        return plan

    def _run_shapes(self, run: CallShapes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self.engine.rehearsals.rehearsing(run), torch.no_grad(), watching(run.note_checkpoint):
            self._run_eagerly(args, kwargs)

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the eager module that was compiled, and leave no trace of it."""
        args, kwargs = replace_leaves((args, kwargs), lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
        with untouched(self.engine.model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.eager(*args, **kwargs)

    def _reached(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Counter[LayerTap]:
        """Count how often autograd reaches each tap from the outputs of an eager run."""
        forwards = self.engine.forwards
        before, forwards.rerunning = forwards.rerunning, True
        try:
            with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
                output = self._run_eagerly(args, kwargs)
        finally:
            forwards.rerunning = before
        nodes = nodes_behind(tensors_in(output))
        return Counter(node.tap for node in nodes if isinstance(getattr(node, "tap", None), LayerTap))


def _autocast() -> tuple[Any, ...]:
    """Return the state that decides the dtypes of layers."""
    devices = ("cpu", "cuda")
    return tuple(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in devices)


class RegionTap(EngineTap):
    """Tap on the forward of the module that torch.compile(module) returns."""

    def __init__(self, engine: Engine, name: str, module: nn.Module, root: RootTap) -> None:
        super().__init__(engine, name, module)
        require_for_compiled()
        inner = original_of(module)
        self.root = root if inner is engine.model else None
        self.region = Region(engine, inner._call_impl)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self.engine.rehearsals.run is not None or self.engine.forwards.in_trial:
            return self.region.eager(*args, **kwargs)
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        if self.root is not None:
            return self.root.run(self.region, self.original, args, kwargs)
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
