"""Capture leaves, through which x and g leave a compiled backward, and the node that receives them.

    plan      the tapped calls of a forward with given arguments, their shapes noted in an eager run
    handout   the capture leaves of one forward pass: each tap gets those of its calls before, and loses them after
    Receiver  the autograd node behind the leaves, outside of every graph: its gradients are x and g of all calls

Two forward passes have two receivers, so that their records stay separate. A backward pass that does not ask for
gradients of parameters runs no receiver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpscope.errors import UserError
from dpscope.flash.sample_rows.rehearsal_run import Run
from dpscope.flash.taps.taps import Engine, LayerTap, Spec, check_backward
from dpscope.flash.taps.traced import Handed
from dpscope.flash.torch_side.autocast import no_autocast

_TICKET = Spec((), torch.float32)


class TappedCall(NamedTuple):
    """One call of a layer. given: its input, which may have one row for all samples; x and y: with a row for each."""

    tap: LayerTap
    given: Spec
    x: Spec
    y: Spec
    device: torch.device
    checkpointed: bool

    def pieces(self, live: Sequence[bool]) -> tuple[Spec | None, ...]:
        return self.tap.piece_specs(self.x, self.y, live)


class CallShapes(Run):
    """An eager run that notes the shapes of every tapped call."""

    def __init__(self, batch: int) -> None:
        super().__init__(batch)
        self.calls: list[TappedCall] = []
        self.checkpoints = 0  # that run now
        self.complete = True  # of each layer's calls it is known that rows are samples

    def see(self, *args: Any, **kwargs: Any) -> None:
        pass

    def see_constant(self, *args: Any, **kwargs: Any) -> None:
        pass

    def answer(self, tap: Any, y: Tensor, dim: int = 0, *, shared: bool = False) -> Tensor:
        if shared and y.dim() > dim and y.shape[dim] == 1:
            y = y.expand([self.batch if axis == dim else size for axis, size in enumerate(y.shape)])
        return y

    def note_layer(self, tap: Any, x: Tensor, y: Tensor, *, shared: bool) -> None:
        if not tap.is_traceable() or x.shape[0] not in (1, self.batch):
            return
        if self.batch > 1 and x.dim() not in (tap.shared if shared else tap.known):
            self.complete = False
            return
        x = tap.prepare(x)
        given = Spec(tuple(x.shape), x.dtype)
        of_all = Spec((self.batch, *x.shape[1:]), x.dtype), Spec((self.batch, *y.shape[1:]), y.dtype)
        self.calls.append(TappedCall(tap, given, *of_all, x.device, self.checkpoints > 0))

    def note_checkpoint(self, checkpoint: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        self.checkpoints += 1
        try:
            return checkpoint(function, *args, **kwargs)
        finally:
            self.checkpoints -= 1


class Share(NamedTuple):
    """Share of one call in a handout. `pieces` are in the tap's order, None where it needs none."""

    call: TappedCall
    like: Tensor
    pieces: tuple[Spec | None, ...]

    def specs(self) -> list[Spec]:
        ticket = [_TICKET] if self.call.checkpointed else []
        return [piece for piece in self.pieces if piece is not None] + ticket


class PieceLayout:
    """The shares of all calls, and where each has its own in the sequence of all capture leaves."""

    def __init__(self, calls: Sequence[TappedCall]) -> None:
        self.shares: list[Share] = []
        self.zeros: list[Tensor] = []  # of which capture leaves are made
        self.of_taps: dict[LayerTap, list[tuple[Tensor, slice]]] = {}
        for call in calls:
            live = call.tap.live()
            if True not in live:
                continue
            share = Share(call, _zeros(call.given, call.device), call.pieces(live))
            first = len(self.zeros)
            self.zeros += [_zeros(spec, call.device) for spec in share.specs()]
            self.shares.append(share)
            self.of_taps.setdefault(call.tap, []).append((share.like, slice(first, len(self.zeros))))


@dataclass
class CallPlan:
    """The tapped calls of a forward, and their layout for each choice of trained parameters."""

    calls: list[TappedCall]
    unreached: set[TappedCall] = field(default_factory=set)  # of which backward is known to leave nothing
    _layouts: dict[tuple[bool, ...], PieceLayout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Inside a checkpoint a graph may not count calls: a tap that is called there is called once.
        times = Counter(call.tap for call in self.calls)
        uncounted = {call.tap for call in self.calls if call.checkpointed}
        self.calls = [call for call in self.calls if call.tap not in uncounted or times[call.tap] == 1]
        self._parameters = [slot.parameter for call in self.calls for slot in call.tap.slots if slot is not None]

    def layout(self) -> PieceLayout:
        trained = tuple([parameter.requires_grad for parameter in self._parameters])
        if trained not in self._layouts:
            self._layouts[trained] = PieceLayout(self.calls)
        return self._layouts[trained]


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
        self.layout = plan.layout()
        self.shares = self.layout.shares
        self.used: Counter[LayerTap] = Counter()  # calls that graphs hold, where they are counted
        self.generation = engine.state.generation
        self.block = engine.block

    @contextmanager
    def given(self) -> Iterator[None]:
        """Give taps their capture leaves inside the block, and their earlier ones afterwards."""
        leaves = Receiver.apply(self.engine.anchor.tensor, self) if self.shares else ()  # type: ignore[no-untyped-call]
        before, end = [], len(leaves)
        for tap, calls in self.layout.of_taps.items():
            tap.check_parameters()
            before.append((tap, tap.handed, tap.calls, tap.counted))
            tap.handed = tuple([Handed(like, leaves[place], place.stop == end) for like, place in calls])
            tap.calls = 0
        for share in self.shares:
            if share.call.checkpointed:
                share.call.tap.counted = False
        try:
            yield
        finally:
            for tap, handed, count, counted in before:
                self.used[tap] = tap.calls
                tap.handed, tap.calls, tap.counted = handed, count, counted
            self.engine.graph_cast.clear()
            self._note_parameters()

    def _note_parameters(self) -> None:
        rehearsals = self.engine.rehearsals
        if rehearsals.followed:
            used = [share.call.tap for share in self.shares if share.call.checkpointed or self.used[share.call.tap]]
            rehearsals.held_by_graphs.update(slot.parameter for tap in used for slot in tap.slots if slot is not None)

    @torch.no_grad()
    def receive(self, left: list[Tensor | None]) -> None:
        """Pass the record of each call in a backward pass to the engine; `left` is empty afterwards."""
        left.reverse()
        seen: Counter[LayerTap] = Counter()
        tickets: list[tuple[LayerTap, Tensor]] = []
        missing: list[TappedCall] = []
        with no_autocast(self.shares[0].call.device.type):
            for share in self.shares:
                tap = share.call.tap
                seen[tap] += 1
                size = len(share.specs())
                arrived = [each for each in (left.pop() for _ in range(size)) if each is not None]
                if len(arrived) == size:
                    self._record(share, arrived, tickets)
                elif arrived:
                    self._refuse_lost(tap)
                elif share.call.checkpointed or seen[tap] <= self.used[tap]:
                    missing.append(share.call)
                del arrived
        if tickets:
            self._check_tickets(tickets)
        if missing:
            self._check_missing(missing)

    def _check_missing(self, missing: list[TappedCall]) -> None:
        """Check that calls without a record in backward are calls that autograd does not reach, compiled or not."""
        new = [call for call in missing if call not in self._plan.unreached]
        if new and self.engine.path_rules.sharded:  # an eager run would wait for ranks that do not do one
            self._refuse_lost(new[0].tap)
        if new:
            reached, lost = self._reached(), Counter(call.tap for call in missing)
            for tap, count in lost.items():
                calls = sum(share.call.tap is tap for share in self.shares)
                if reached[tap] > calls - count:
                    self._refuse_lost(tap)
            self._plan.unreached.update(new)

    def _record(self, share: Share, arrived: list[Tensor], tickets: list[tuple[LayerTap, Tensor]]) -> None:
        tap = share.call.tap
        if share.call.checkpointed:
            tickets.append((tap, arrived.pop()))
        # Lazily negated: kernels that read memory by its address would see the other sign.
        pieces = iter([piece.resolve_neg() if piece.is_neg() else piece for piece in arrived])
        arrived.clear()
        # A graph may give one tensor out for two calls.
        tap.record([None if spec is None else next(pieces) for spec in share.pieces], owned=False)

    def _check_tickets(self, tickets: list[tuple[LayerTap, Tensor]]) -> None:
        counts = torch.stack([ticket for _, ticket in tickets]).tolist()
        for (tap, _), count in zip(tickets, counts, strict=True):
            if count != 1:
                raise UserError(
                    f"{tap.name} was called {count:g} times in a compiled checkpoint, but once when the model was "
                    "tried out, so its calls cannot be told apart: leave it out with torch.compiler.disable"
                )

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
        ctx.handout = handout
        ctx.set_materialize_grads(False)
        # Each a tensor of its own, of no view and no copy.
        return tuple([zeros.data for zeros in handout.layout.zeros])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        handout: Handout = ctx.handout
        engine = handout.engine
        if not engine.anchor.is_recording():
            return None, None
        if torch.is_grad_enabled() or handout.generation != engine.state.generation:
            check_backward(handout.shares[0].call.tap, handout.generation)
        if handout.block is not None:
            with handout.block.running():
                handout.receive(list(grads))
            return None, None
        # Autograd holds all of these until this returns. Afterwards each call's are let go as they are used.
        waiting = list(grads)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: handout.receive(waiting))
        return None, None
