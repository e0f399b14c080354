"""State of a training step: the micro-batch that is open, and the clipped sums of the micro-batches before it.

The micro-batch is in one of four states:

    CLOSED        no forward pass since the last closing or zero_grad()
    OPENED        a forward pass has told the number of samples
    RECORDED      a backward pass has left contributions, or was that of an empty batch
    ABORTED       its backward pass or closing has failed: nothing is left of it, and no step is taken before it is run
                  again

and the sums of the micro-batches that are closed are in one of five:

    COLLECTING    no optimizer has used them; zero_grad() drops them
    ACCUMULATING  they belong to a logical batch that is not complete; zero_grad() keeps them
    APPLIED       an optimizer has used them; zero_grad() has to come before its next step
    LOST          an error has dropped them; zero_grad() has to come before the next closing or step
    GIVEN_UP      an error has dropped sums of a draw, or came when its step was accounted for: another draw has to come
                  before the next closing or step

| transition        | called by                         | micro-batch              | sums                              |
| ----------------- | --------------------------------- | ------------------------ | --------------------------------- |
| open(size, rows)  | a forward pass                    | CLOSED, OPENED -> OPENED |                                   |
|                   | one that backward runs again      | RECORDED stays           |                                   |
| record(slot)      | a backward pass                   | any -> RECORDED          | refused if one is counted already |
|                   |                                   |                          | and accumulation is forbidden, or |
|                   |                                   |                          | its draw goes on                  |
| close()           | finish(), clipped_sums()          | any -> CLOSED            | refused if LOST or GIVEN_UP, or   |
|                   |                                   |                          | OPENED and none is counted        |
| fail()            | an error in a closing, or before  | any -> ABORTED           |                                   |
|                   | it in a backward pass             |                          |                                   |
| lose(others)      | an error while sums are made, or  | any -> ABORTED           | none is counted; -> LOST if sums  |
|                   | the step is taken                 |                          | of others are lost, or GIVEN_UP   |
|                   |                                   |                          | from ACCUMULATING or APPLIED      |
| refuse_split(ids) | the same, before it               |                          | refused if they hold a sample of  |
|                   |                                   |                          | which there are more rows         |
| count(size, clip) | the same, when norms are taken    |                          | one micro-batch more is counted   |
| observe(counted)  | the same, before it               |                          | the clipping rule's count adds up |
| drop()            | detach()                          | any -> CLOSED            |                                   |
| discard()         | discard()                         | any -> CLOSED            | none is counted, unless           |
|                   |                                   |                          | ACCUMULATING                      |
| clear()           | zero_grad()                       | any -> CLOSED            | the same, and APPLIED ->          |
|                   |                                   |                          | COLLECTING, LOST -> COLLECTING;   |
|                   |                                   |                          | ACCUMULATING -> GIVEN_UP if one   |
|                   |                                   |                          | is counted                        |
| begin_step()      | step()                            | refused if ABORTED       | refused if APPLIED or LOST        |
| skip_step()       | step() within a logical batch     |                          | -> ACCUMULATING, none is counted  |
| complete()        | a loop that leaves one            |                          | ACCUMULATING -> COLLECTING        |
| forget_sums()     | step() that begins another draw   |                          | -> COLLECTING, none is counted    |
| apply(account)    | the same, before the update       |                          | -> APPLIED, none is counted       |

Every transition is legal from every state, except what is said to be refused, and open() of a RECORDED micro-batch
outside of backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from operator import attrgetter
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from dpscope.errors import UserError
from dpscope.flash.gradients.contributions import Contribution, wide
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.padding.rows import Rows
from dpscope.flash.ranks.ranks import WHOLE_SAMPLES
from dpscope.flash.torch_side.attributes import temporarily
from dpscope.flash.torch_side.autograd_graph import in_backward
from dpscope.flash.torch_side.shards import as_part_of, local

Recorded = list[tuple[Slot, list[Contribution]]]  # what a micro-batch's backward passes have left


class MicroBatchState(Enum):
    CLOSED = auto()
    OPENED = auto()
    RECORDED = auto()
    ABORTED = auto()


class SumsState(Enum):
    COLLECTING = auto()
    ACCUMULATING = auto()
    APPLIED = auto()
    LOST = auto()
    GIVEN_UP = auto()


CLOSED, OPENED, RECORDED, ABORTED = MicroBatchState
COLLECTING, ACCUMULATING, APPLIED, LOST, GIVEN_UP = SumsState


def _reading(name: str) -> Any:
    """Return a property that reads an attribute, which only transitions write."""
    return property(attrgetter(name))


class StepState:
    """State of a training step. Only the transitions change it."""

    micro_batch: MicroBatchState = _reading("_micro_batch")
    sums: SumsState = _reading("_sums")
    # The number of samples of the last forward pass whose graph can be run backward: zero_grad() may come between.
    size_in_backward: int | None = _reading("_size")
    rows: Rows | None = _reading("_rows")  # of the same: which of them are samples, if its batch was padded
    # Counts micro-batches closed or dropped after a backward pass, and forwards of other padded batches. Graphs of an
    # older generation cannot run backward again.
    generation: int = _reading("_generation")
    samples: int = _reading("_samples")  # of the micro-batches that were counted since the sums were last discarded
    largest_clip: float = _reading("_largest_clip")  # of the micro-batches in the sums: C may change between them
    observed: Tensor | None = _reading("_observed")  # the clipping rule's count over them; None if it counts nothing

    def __init__(self) -> None:
        self._micro_batch, self._sums = CLOSED, COLLECTING
        self._size: int | None = None
        self._rows: Rows | None = None
        self._last_rows: Rows | None = None  # of the last micro-batch in the sums
        self._rows_before: Rows | None = None  # the same, of sums that were used or lost
        self._generation = self._samples = 0
        self._touched: dict[Slot, None] = {}
        self._running: set[object] = set()  # backward passes that have not ended, or ended with an error
        self._counted = 0  # micro-batches in the sums
        self._largest_clip = 0.0
        self._observed: Tensor | None = None
        self._ids: set[int] = set()  # of samples in the sums whose rows were grouped
        self._has_others = False  # the sums hold samples whose rows were not
        self._forbids_accumulation = False
        self._forget: list[Callable[[], None]] = []

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def recorded(self) -> bool:
        return self._micro_batch is RECORDED

    @property
    def accumulating(self) -> bool:
        return self._sums is ACCUMULATING

    @property
    def given_up(self) -> bool:
        return self._sums is GIVEN_UP

    @property
    def knows_draw(self) -> bool:
        """True if batches of another draw are told by their rows."""
        return self._rows_before is not None and self._rows_before.draw is not None

    @property
    def batch_size(self) -> int | None:
        """Number of samples of the micro-batch; None if there is none."""
        return None if self._micro_batch is CLOSED else self._size

    @property
    def running_size(self) -> int | None:
        """Number of samples of a forward pass before backward, or of a checkpoint's rerun in it; None elsewhere."""
        return self._size if self._micro_batch is OPENED or in_backward() else None

    @property
    def draw_goes_on(self) -> bool:
        """True if the draw of the last backward pass has parts that are still to come."""
        rows = self._rows if self.recorded else self._last_rows
        return rows is not None and rows.more

    def leaves_out_rest(self, rows: Rows | None) -> bool:
        """Return True if the sums hold a part of a draw, and a batch with these rows belongs to another one."""
        last = self._last_rows
        return self.accumulating and last is not None and last.more and rows is not None and rows.draw != last.draw

    def meet(self, rows: Rows | None) -> None:
        """Meet the rows of a padded batch: one of another draw ends a draw that was given up."""
        if self.given_up and rows is not None and self._rows_before and rows.draw != self._rows_before.draw:
            self.forget_sums()

    @property
    def micro_batches(self) -> int:
        """Micro-batches that a step would use now: the counted ones, and the one that a backward pass has reached."""
        return self._counted + self.recorded

    def check_graph(self, module: str, generation: int) -> None:
        """Refuse a backward pass through a forward pass of an earlier generation."""
        if generation != self._generation:
            raise UserError(
                f"backward reached {module} through a forward pass whose samples are already clipped and summed, or "
                "which was followed by that of another padded batch: call backward before the next forward pass"
            )

    # -- the micro-batch ---------------------------------------------------------------------------------------------

    def open(self, size: int, *, rows: Rows | None = None, in_backward: bool = False) -> None:
        if self._micro_batch is not RECORDED:
            self._micro_batch = OPENED
            if not in_backward:
                self._running.clear()
            # Backward passes are of this forward pass from now on, or it is not known of which rows.
            if rows != self._rows:
                self._generation += 1
                self._rows = rows
        elif not in_backward:
            raise RuntimeError("a micro-batch with a backward pass has to be closed before the next is opened")
        self._size = size

    def expecting(self, size: int) -> AbstractContextManager[None]:
        """Expect forward passes of `size` samples inside the block; they leave nothing."""
        return temporarily(self, _micro_batch=OPENED, _size=size)

    @contextmanager
    def trial(self, size: int) -> Iterator[None]:
        """Expect passes of `size` samples inside the block, whose record `take_recorded` returns; then restore all."""
        rows = {"_rows": None, "_last_rows": None}
        sums = {"_counted": 0, "_touched": {}, "_running": set(), "_sums": COLLECTING}
        with temporarily(self, _micro_batch=OPENED, _size=size, **rows, **sums):
            try:
                yield
            finally:
                self.take_recorded()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture a micro-batch in a CUDA graph inside the block, which runs nothing; restore all of it afterwards."""
        before = dict(vars(self))
        self._counted, self._last_rows, self._observed = 0, None, None
        try:
            yield
        finally:
            self.drop()
            generation = self._generation
            vars(self).update(before, _generation=generation)

    def replay(self, size: int, rows: Rows | None) -> None:
        """Open, record and close a micro-batch that a graph has run."""
        self.open(size, rows=rows)
        self.record()
        self.drop()

    def take_recorded(self) -> Recorded:
        """Take what backward passes have left, in the order in which they met parameters."""
        recorded = [(slot, slot.contributions) for slot in self._touched]
        for slot in self._touched:
            slot.contributions = []
        self._touched.clear()
        return recorded

    def when_dropped(self, forget: Callable[[], None]) -> None:
        """Register a function to call when a micro-batch is dropped or closed."""
        self._forget.append(forget)

    def forbid_accumulation(self) -> None:
        """Allow only one micro-batch a step from now on: under Poisson sampling it is the whole draw."""
        self._forbids_accumulation = True

    def record(self, slot: Slot | None = None) -> None:
        """Record that a backward pass reached a parameter. With an empty batch it reaches none, and counts as well."""
        if self._micro_batch is not RECORDED:
            if self._counted:
                self._refuse_second()
            self._micro_batch = RECORDED
        if slot is not None:
            self._touched[slot] = None

    def _refuse_second(self) -> None:
        """Refuse a second micro-batch in a step that is to have one."""
        is_cut = self._last_rows is not None and self._last_rows.more
        if not is_cut and not self._forbids_accumulation:
            return
        self._running.clear()  # the first one can be used
        raise UserError(
            "a second backward pass since the last step, but "
            + (
                "the padded loader has cut this draw into several batches: call optimizer.step() and zero_grad() for "
                "each; the last takes the step"
                if is_cut
                else "a Poisson draw is one step: call step() and zero_grad() after each, or use Opacus's "
                "BatchMemoryManager (in a Trainer: dpscope.transformers)"
            )
        )

    def begin_backward(self) -> Callable[[], None]:
        """Note that a backward pass begins. Return what it calls at its end, unless that is an error."""
        running, this = self._running, object()
        running.add(this)
        return lambda: running.discard(this)

    def fail_unfinished(self) -> None:
        """Forget a micro-batch whose backward pass has ended with an error."""
        if self._running:
            self.fail()

    def close(self) -> Recorded | None:
        """Return the record of the backward passes: empty for an empty batch, None if there was no backward pass."""
        self._refuse_lost()
        self.fail_unfinished()
        if self.given_up:
            self.refuse_draw()
        if self._micro_batch is OPENED and self._size and not self._counted:
            raise UserError(
                f"there was a forward pass of {self._size} samples, but no backward pass that accumulates "
                "the parameters' gradients: call loss.backward() without inputs=…, or zero_grad() to forget the pass"
            )
        was_recorded = self.recorded
        recorded = self.take_recorded()
        self.drop()
        return recorded if was_recorded else None

    def refuse_split(self, ids: frozenset[int] | None, sums_remain: Callable[[], bool]) -> None:
        """Refuse a micro-batch with rows of a sample that is in the sums already. `ids`: of rows that were grouped."""
        split = self._ids.intersection(ids or ())
        if not split and not (self._has_others if ids else self._ids):
            return
        if not sums_remain():  # the loop has cleared p.grad itself
            self._ids, self._has_others = set(), False
        elif split:
            raise UserError(f"sample {min(split)} has rows in two batches of one step: {WHOLE_SAMPLES}")
        else:
            raise UserError("group_rows was called for some batches of a step and not for others: call it for each")

    def count(
        self, size: int = 0, clip: float = 0.0, rows: Rows | None = None, ids: frozenset[int] | None = None
    ) -> None:
        """Count the closed micro-batch, which is now in the sums: `size` samples, clipped at `clip`."""
        self._counted += 1
        self._ids.update(ids or ())
        self._has_others |= size > 0 and ids is None
        self._last_rows = rows
        self._samples += size
        self._largest_clip = max(self._largest_clip, clip)

    def observe(self, counted: Tensor | None) -> None:
        """Add up what the clipping rule counts in a micro-batch that is closed."""
        if counted is not None:
            self._observed = counted if self._observed is None else self._observed + counted

    def drop(self) -> None:
        """Forget the micro-batch with all that backward passes have left."""
        self.take_recorded()
        self._running.clear()
        for forget in self._forget:
            forget()
        if self._micro_batch is RECORDED:
            self._generation += 1
            self._size = self._rows = None
        self._micro_batch = CLOSED

    def fail(self) -> None:
        """Forget the micro-batch, whose closing has failed. The sums are those of before."""
        self.drop()
        self._micro_batch = ABORTED

    # -- the sums ----------------------------------------------------------------------------------------------------

    def lose(self, *, others: bool) -> None:
        """Forget the micro-batch and the sums after an error. `others`: sums of other micro-batches were among them.

        A loop may try the batch again. That is the whole step if there were no others and it is not accounted for.
        """
        if others and self._sums in (ACCUMULATING, APPLIED):
            self._sums = GIVEN_UP
        elif self._sums in (COLLECTING, ACCUMULATING):
            self._sums = LOST if others else COLLECTING
        self._samples = 0
        self._empty()
        self.fail()

    def _refuse_lost(self) -> None:
        if self._sums is LOST:
            raise UserError(
                "an error has dropped the clipped sums of earlier batches of this step: call zero_grad(), and train on "
                "all batches of the step again"
            )

    def refuse_draw(self) -> NoReturn:
        raise UserError(
            "this draw was given up: an error, or zero_grad() before step(), has dropped sums of it, or an error came "
            "when its step was accounted for. Its batches cannot be tried again: call zero_grad(), and go on with the "
            "next draw"
        )

    def discard(self) -> None:
        self.drop()
        if self._sums is not ACCUMULATING:
            self._samples = 0
            self._empty()

    def clear(self) -> bool:
        """Discard the micro-batch. Return True if the sums are to be cleared, too."""
        if self.accumulating and self._counted:  # without a step(): its sums cannot be taken out
            self.lose(others=True)
        self.discard()
        if self.accumulating:
            return False
        if not self.given_up:
            self._sums = COLLECTING
        return True

    def begin_step(self) -> None:
        self._refuse_lost()
        self.fail_unfinished()
        if self._micro_batch is ABORTED and not self.given_up:
            raise UserError(
                "an error has dropped what the backward pass of this batch had left: run forward and backward of it "
                "again before step()"
            )
        if self._sums is APPLIED:
            raise ValueError(
                "Gradients haven't been cleared since the last optimizer step. In order to obtain privacy guarantees "
                "you must call optimizer.zero_grad() on each step"
            )

    def skip_step(self) -> None:
        """Continue the logical batch. All of it counts as one micro-batch."""
        self.begin_step()
        self._sums = ACCUMULATING
        self._counted = 0

    def complete(self) -> None:
        """End the logical batch, which is left incomplete."""
        if self._sums is ACCUMULATING:
            self._sums = COLLECTING

    def forget_sums(self) -> None:
        """Forget sums that stay incomplete, and keep the micro-batch."""
        self._sums, self._samples = COLLECTING, 0
        self._empty()

    def apply(self, account: Callable[[], None]) -> None:
        """Mark the sums as used. `account` runs before the count of micro-batches is reset."""
        self.begin_step()
        self._sums = APPLIED
        account()
        self._empty()

    def _empty(self) -> None:
        self._counted = 0
        self._rows_before, self._last_rows = self._last_rows or self._rows_before, None
        self._observed = None
        self._largest_clip = 0.0
        self._ids, self._has_others = set(), False


class RunningSums:
    """Clipped sums of the micro-batches of a step, between two clearings.

    They belong to the engine: nothing of them is in p.grad until `hand_out`, so whatever a training loop does to
    gradients in between (clipping, scaling, clearing) changes nothing. They are float32 even for half-precision
    parameters, because rounded sums of two neighbouring batches may differ by more than C.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._names = {slot.parameter: slot.name for slot in slots}
        self._held: dict[nn.Parameter, Tensor] = {}
        self._written: dict[nn.Parameter, TensorWeakRef] = {}  # gradients that were made here
        self._warned = False

    def __bool__(self) -> bool:
        return bool(self._held)

    def remain(self) -> bool:
        """Return whether sums are held, or were handed out and are still in p.grad."""
        return bool(self._held) or any(map(self._wrote, self._names))

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

    def drop(self) -> None:
        """Drop all sums that are held."""
        self._held.clear()

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
        return reference is not None and (gradient := reference()) is not None and gradient is parameter.grad
