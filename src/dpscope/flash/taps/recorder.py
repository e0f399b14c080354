"""Recorders: how tapped calls are recorded in an ordinary pass, in a checkpointed block, or in a compiled graph.

The engine has one recorder at a time. A tap hands it to the layer family as `ctx.recorder`, and backward uses the same
one. A family asks it to save tensors, to multiply and to add up; it does not know where its layer runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash.gradients.clip_rules import ClipRule
from dpscope.flash.gradients.contributions import Contribution
from dpscope.flash.gradients.paths import PathRules
from dpscope.flash.gradients.slots import RowGroups, Slot
from dpscope.flash.kernels import rms_norm, sample_sums
from dpscope.flash.padding.rows import Rows
from dpscope.flash.ranks.ranks import Ranks
from dpscope.flash.sample_rows.forward_passes import ForwardPasses
from dpscope.flash.sample_rows.verification import Verification
from dpscope.flash.step.microbatch import MicroBatch
from dpscope.flash.step.step_state import Recorded, StepState
from dpscope.flash.torch_side import autograd_graph
from dpscope.flash.torch_side.attributes import temporarily
from dpscope.flash.torch_side.autocast import SharedCast
from dpscope.flash.torch_side.autograd_graph import Anchor

_graph_task = torch._C._current_graph_task_id
_NOTES_VIEWS = torch._C.DispatchKey.ADInplaceOrView
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded


class Engine(Protocol):
    """Interface of the engine for its taps and checkpointed blocks."""

    model: nn.Module
    ranks: Ranks
    state: StepState
    forwards: ForwardPasses
    verification: Verification
    path_rules: PathRules
    clip: ClipRule
    groups: RowGroups
    cast: SharedCast
    anchor: Anchor
    recorder: Recorder
    graphs: Any  # the recorder of calls inside compiled graphs (compiled/traced.py)
    refusal: type[UserError]

    @property
    def parameters(self) -> Collection[nn.Parameter]: ...

    def slot(self, parameter: Tensor | None) -> Slot: ...

    def add(self, slot: Slot, contribution: Contribution) -> None: ...

    def micro_batch(self, recorded: Recorded, rows: Rows | None, *, groups: Sequence[int]) -> MicroBatch: ...

    def zero_grad(self, set_to_none: bool = True) -> bool: ...

    def without_taps(self) -> AbstractContextManager[None]: ...


class Recorder:
    """Recorder of ordinary passes: what layers leave is held until the micro-batch is closed."""

    wanted: Collection[Slot] | None = None  # parameters whose gradients are recorded; None: all
    notes_inputs = True  # layers note what they read, by its address
    sums_at_once = False  # sums over positions are taken in backward, and not postponed
    runs_again = False  # layers that ask for their path are in a block that runs again for its sums, or is to

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Record with this recorder inside the context."""
        with temporarily(self.engine, recorder=self):
            yield

    def add(self, slot: Slot, contribution: Contribution) -> None:
        """Take what a layer leaves for a parameter."""
        self.engine.state.record(slot)
        slot.add(contribution)

    def call_without_gradients(self, tap: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a tapped layer while gradients are disabled."""
        return tap.original(*args, **kwargs)

    # -- for layer families ------------------------------------------------------------------------------------------

    save = staticmethod(autograd_graph.save)
    saved = staticmethod(autograd_graph.saved)
    bias_sums = staticmethod(sample_sums.bias_sums)
    layer_norm_sums = staticmethod(sample_sums.layer_norm_sums)
    rms_norm_gradients = staticmethod(rms_norm.rms_norm_gradients)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + b."""
        if _is_excluded(_NOTES_VIEWS):
            return F.linear(x, weight, bias)
        _set_excluded(_NOTES_VIEWS, True)  # F.linear makes a matrix and gives a view of it, which would be copied
        try:
            return F.linear(x, weight, bias)
        finally:
            _set_excluded(_NOTES_VIEWS, False)


# -- autograd functions that record ------------------------------------------------------------------------------------


def note_call(ctx: Any, tap: Any) -> None:
    """Note in a forward how its backward is recorded."""
    engine = tap.engine
    ctx.tap, ctx.recorder, ctx.generation = tap, engine.recorder, engine.state.generation


def is_recording(ctx: Any) -> bool:
    """Return whether this backward pass records. Refuse one that is not the micro-batch's, or is differentiated."""
    engine: Engine = ctx.tap.engine
    anchor, differentiated = engine.anchor, torch.is_grad_enabled()
    recording = anchor.recording if _graph_task() == anchor.graph_task else anchor.is_recording()
    if differentiated or (recording and ctx.generation != engine.state.generation):
        engine.state.check_graph(ctx.tap.name, ctx.generation)
        if differentiated:
            raise ctx.tap.does_not_fit(
                "backward(create_graph=True) is not supported: per-sample gradients of gradients are not taken"
            )
    return recording


def record(ctx: Any, samples: int, add: Callable[[], None]) -> None:
    """Call `add`, which gives the engine what the call leaves, with the recorder of its forward."""
    if not samples:
        ctx.tap.engine.state.record()
        return
    recorder = ctx.recorder
    with nullcontext() if recorder is ctx.tap.engine.recorder else recorder.entered():
        add()
