"""Regions: what torch.compile has compiled, the model or modules inside it, called with capture leaves for taps.

Through capture leaves x and g leave a compiled backward:

    plan      the tapped calls of a forward with given arguments, their shapes noted in an eager run
    handout   the capture leaves of one forward pass: each tap gets those of its calls before, and loses them after
    Receiver  the autograd node behind the leaves, outside of every graph: its gradients are x and g of all calls

Two forward passes have two receivers, so that their records stay separate. A backward pass that does not ask for
gradients of parameters runs no receiver.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpscope.errors import UserError
from dpscope.flash.compiled.traced import GraphCalls, Leaves
from dpscope.flash.sample_rows.snapshots import untouched
from dpscope.flash.taps.recorder import Engine, Recorder, is_recording, note_call
from dpscope.flash.taps.taps import LayerTap, Spec
from dpscope.flash.torch_side.arguments import replace_leaves, sizes_of, tensors_in
from dpscope.flash.torch_side.attributes import temporarily
from dpscope.flash.torch_side.autocast import no_autocast
from dpscope.flash.torch_side.autograd_graph import nodes_behind
from dpscope.flash.torch_side.checkpoint_calls import watching
from dpscope.flash.torch_side.frames import eagerly


class TappedCall(NamedTuple):
    """One call of a layer. given: its input, which may have one row for all samples; pieces: as in `piece_specs`."""

    tap: LayerTap
    given: Spec
    pieces: tuple[Spec | None, ...]
    device: torch.device
    checkpointed: bool

    def leaves(self) -> list[Spec]:
        """Return shapes and dtypes of its capture leaves. No graph gives integers out as a gradient."""
        pieces = [piece for piece in self.pieces if piece is not None]
        leaves = [each if each.dtype.is_floating_point else Spec(each.shape, torch.float64) for each in pieces]
        return [*leaves, Spec((), torch.float32)] if self.checkpointed else leaves  # in a checkpoint, a ticket too


class CallShapes(Recorder):
    """Recorder of the shapes of every tapped call in an eager run without gradients."""

    def __init__(self, engine: Engine, batch: int) -> None:
        super().__init__(engine)
        self.batch = batch
        self.calls: list[TappedCall] = []
        self.checkpoints = 0  # that run now
        self.complete = True  # of each layer's calls it is known that rows are samples

    def call_without_gradients(self, tap: LayerTap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer on x as a graph would: an output that all samples share has a row for each."""
        (x,) = (*args, *kwargs.values())
        live = tap.live()
        if True not in live:
            return tap.original(x)
        blocks = tap.blocks_in(x, self.batch)
        if blocks is not None:
            return self.call_without_gradients(tap, (blocks,), {}).flatten(0, 1)
        tap.admit(x)
        shared = x.shape[0] == 1 != self.batch
        y: Tensor = tap.call_original(x)
        if tap.is_traceable() and x.shape[0] in (1, self.batch):
            if self.batch > 1 and x.dim() not in (tap.shared if shared else tap.known):
                self.complete = False
            else:
                x = tap.prepare(x)
                of_x, of_y = (Spec((self.batch, *each.shape[1:]), each.dtype) for each in (x, y))  # a row for each
                pieces = tap.piece_specs(of_x, of_y, live)
                given = Spec(tuple(x.shape), x.dtype)
                self.calls.append(TappedCall(tap, given, pieces, x.device, self.checkpoints > 0))
        return y.expand(self.batch, *y.shape[1:]) if shared and y.dim() and y.shape[0] == 1 else y

    def note_checkpoint(self, checkpoint: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        self.checkpoints += 1
        try:
            return checkpoint(function, *args, **kwargs)
        finally:
            self.checkpoints -= 1


class CallPlan:
    """The tapped calls of a forward, and where each has its own in the sequence of all capture leaves."""

    def __init__(self, calls: Sequence[TappedCall]) -> None:
        # Inside a checkpoint a graph may not count calls: a tap that is called there is called once.
        times = Counter(call.tap for call in calls)
        self.uncounted = {call.tap for call in calls if call.checkpointed}
        self.calls = [call for call in calls if call.tap not in self.uncounted or times[call.tap] == 1]
        self.unreached: set[TappedCall] = set()  # of which backward is known to leave nothing
        self.zeros: list[Tensor] = []  # of which capture leaves are made
        self.of_taps: dict[LayerTap, list[tuple[Tensor, slice]]] = {}
        for call in self.calls:
            first = len(self.zeros)
            self.zeros += [_zeros(spec, call.device) for spec in call.leaves()]
            place = slice(first, len(self.zeros))
            self.of_taps.setdefault(call.tap, []).append((_zeros(call.given, call.device), place))


def _zeros(spec: Spec, device: torch.device) -> Tensor:
    """Return a tensor that repeats one element. Its values are never read."""
    return torch.empty_strided(spec.shape, (0,) * len(spec.shape), dtype=spec.dtype, device=device)


class Handout:
    """The capture leaves of one forward pass.

    reached  which taps autograd reaches from the outputs of the same call, run eagerly, and how often
    """

    def __init__(self, engine: Engine, plan: CallPlan, reached: Callable[[], Counter[LayerTap]]) -> None:
        self.engine = engine
        self._plan = plan
        self._reached = reached
        self.calls, self.zeros = plan.calls, plan.zeros
        self.used: Counter[LayerTap] = Counter()  # calls that graphs hold, where they are counted

    @contextmanager
    def given(self) -> Iterator[None]:
        """Give taps their capture leaves inside the block, and their earlier ones afterwards."""
        leaves = Receiver.apply(self.engine.anchor.tensor, self) if self.calls else ()  # type: ignore[no-untyped-call]
        before, end = [], len(leaves)
        for tap, calls in self._plan.of_taps.items():
            tap.check_parameters()
            before.append((tap, tap.graph_calls))
            handed = tuple([Leaves(like, leaves[place], place.stop == end) for like, place in calls])
            tap.graph_calls = GraphCalls(handed, counted=tap not in self._plan.uncounted)
        try:
            yield
        finally:
            for tap, earlier in before:
                self.used[tap] = tap.graph_calls.used
                tap.graph_calls = earlier
            self.engine.graphs.last_cast.clear()
            if (verification := self.engine.verification).followed:
                used = [call.tap for call in self.calls if call.checkpointed or self.used[call.tap]]
                held = {slot.parameter for tap in used for slot in tap.slots if slot is not None}
                verification.held_by_graphs.update(held)

    @torch.no_grad()
    def receive(self, left: list[Tensor | None]) -> None:
        """Pass the record of each call in a backward pass to the engine; `left` is empty afterwards."""
        left.reverse()
        seen: Counter[LayerTap] = Counter()
        tickets: list[tuple[LayerTap, Tensor]] = []
        missing: list[TappedCall] = []
        with no_autocast(self.calls[0].device.type):
            for call in self.calls:
                tap = call.tap
                seen[tap] += 1
                size = len(call.leaves())
                arrived = [each for each in (left.pop() for _ in range(size)) if each is not None]
                if len(arrived) == size:
                    if call.checkpointed:
                        tickets.append((tap, arrived.pop()))
                    # Lazily negated: kernels that read memory by its address would see the other sign.
                    pieces = iter([piece.resolve_neg() if piece.is_neg() else piece for piece in arrived])
                    arrived.clear()
                    # A graph may give one tensor out for two calls, and integers as float64.
                    found = [
                        None
                        if spec is None
                        else next(pieces)
                        if spec.dtype.is_floating_point
                        else next(pieces).to(spec.dtype)
                        for spec in call.pieces
                    ]
                    tap.record(found, owned=False)
                    del pieces, found
                elif arrived:
                    self._refuse_lost(tap)
                elif call.checkpointed or seen[tap] <= self.used[tap]:
                    missing.append(call)
                del arrived
        counts = torch.stack([ticket for _, ticket in tickets]).tolist() if tickets else []
        for (tap, _), count in zip(tickets, counts, strict=True):
            if count != 1:
                raise UserError(
                    f"{tap.name} was called {count:g} times in a compiled checkpoint, but once when the model was "
                    "tried out, so its calls cannot be told apart: leave it out with torch.compiler.disable"
                )
        if missing:
            self._check_missing(missing)

    def _check_missing(self, missing: list[TappedCall]) -> None:
        """Check that calls without a record in backward are calls that autograd does not reach, compiled or not."""
        new = [call for call in missing if call not in self._plan.unreached]
        if new and self.engine.ranks.gathers_weights:  # an eager run would wait for ranks that do not do one
            self._refuse_lost(new[0].tap)
        if new:
            reached, lost = self._reached(), Counter(call.tap for call in missing)
            for tap, count in lost.items():
                calls = sum(call.tap is tap for call in self.calls)
                if reached[tap] > calls - count:
                    self._refuse_lost(tap)
            self._plan.unreached.update(new)

    def _refuse_lost(self, tap: LayerTap) -> None:
        raise UserError(
            f"{tap.name} was called in a compiled graph, and a backward pass left nothing of it where an eager one "
            "would (or might, if the model is sharded): leave it out with torch.compiler.disable, or freeze it; causes "
            "and other fixes are in docs/sharp-edges.md#layer-lost-in-a-compiled-graph"
        )


class Receiver(torch.autograd.Function):
    """Autograd node that makes capture leaves and receives their gradients. `anchor` is as in `Tapped`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, handout: Handout) -> tuple[Tensor, ...]:
        note_call(ctx, handout.calls[0].tap)
        ctx.handout = handout
        ctx.set_materialize_grads(False)
        # Each a tensor of its own, of no view and no copy.
        return tuple([zeros.data for zeros in handout.zeros])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        if not is_recording(ctx):
            return None, None
        handout: Handout = ctx.handout
        if ctx.recorder is not handout.engine.recorder:
            with ctx.recorder.entered():
                handout.receive(list(grads))
            return None, None
        # Autograd holds all of these until this returns. Afterwards each call's are let go as they are used.
        waiting = list(grads)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: handout.receive(waiting))
        return None, None


# -- regions -----------------------------------------------------------------------------------------------------------


# A plan holds a small tensor for each capture leaf of each layer; another one takes an eager run without gradients.
MOST_PLANS = 16


class Region:
    """Compiled part of a model. `eager` is the module that was compiled."""

    def __init__(self, engine: Engine, eager: Callable[..., Any]) -> None:
        self.engine = engine
        self.eager = eager
        self._plans: dict[Any, CallPlan] = {}

    def entered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Give the taps of the region capture leaves for one call of it with these arguments."""
        return Handout(self.engine, self._plan(args, kwargs), lambda: self._reached(args, kwargs)).given()

    def _plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
        batch = self.engine.forwards.size() or 0
        trained = tuple([parameter.requires_grad for parameter in self.engine.parameters])
        devices = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        autocast = tuple([(device, torch.get_autocast_dtype(device)) for device in devices])  # decides dtypes of layers
        key = (batch, self.engine.model.training, trained, sizes_of((args, kwargs)), autocast)
        plan = self._plans.pop(key, None)
        if plan is None:
            run = CallShapes(self.engine, batch)
            try:
                locally = self.engine.verification.locally()
                with run.entered(), locally, torch.no_grad(), watching(run.note_checkpoint):
                    self._run_eagerly(args, kwargs)
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

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the eager module that was compiled, and leave no trace of it."""
        args, kwargs = replace_leaves((args, kwargs), lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)
        with untouched(self.engine.model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.eager(*args, **kwargs)

    def _reached(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Counter[LayerTap]:
        """Count how often autograd reaches each tap from the outputs of an eager run."""
        with temporarily(self.engine.forwards, rerunning=True), torch.enable_grad(), eagerly():
            output = self._run_eagerly(args, kwargs)
        nodes = nodes_behind(tensors_in(output))
        return Counter(node.tap for node in nodes if isinstance(getattr(node, "tap", None), LayerTap))
