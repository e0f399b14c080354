"""Forward passes of a model with an engine: how many samples they have, and whether rows are samples.

The root's forward gives the number of samples. A layer is accepted if row b of its input is known to belong to sample
b. The first time the root is called in some way, that is verified.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash.gradients.memory_budget import MemoryBudget
from dpscope.flash.padding.rows import Rows, has_marks, mark_batch, rows_in, without_marks
from dpscope.flash.ranks.ranks import Ranks
from dpscope.flash.sample_rows.proxy import NotFollowed, Proxy, RanOutOfMemory, Sampled
from dpscope.flash.sample_rows.tried_call import RootCall
from dpscope.flash.sample_rows.verification import UnknownCall, Verification
from dpscope.flash.step.step_state import CLOSED, StepState
from dpscope.flash.torch_side.arguments import (
    KEEP_BATCH_FIRST,
    NEEDS_DENSE,
    leaves_in,
    make_up_sample,
    replace_leaves,
    rows_of,
    tensors_in,
    without_rows,
)
from dpscope.flash.torch_side.autograd_graph import (
    Hooks,
    current_hooks,
    in_backward,
    in_reentrant_checkpoint,
    without_hooks,
)
from dpscope.flash.torch_side.captures import own_capture, refuse_capture
from dpscope.flash.torch_side.module_state import uncached_parametrizations

BatchSizeOf = Callable[[tuple[Any, ...], dict[str, Any]], int]  # of a call's args and kwargs


class SampledLayer(Sampled, Protocol):
    def admit(self, x: Tensor) -> None:
        """Raise if x has no batch dimension."""

    def does_not_fit(self, reason: str) -> BaseException:
        """Return the error to raise if the module cannot be tapped this way."""


class WatchedBlocks(Protocol):
    """Checkpointed blocks that are noted in forward passes."""

    def begin_micro_batch(self) -> None: ...

    def watching(self) -> AbstractContextManager[None]: ...


def refuse_unknown_rows(count: int) -> NoReturn:
    raise UserError(
        f"the model was called with {count} rows that do not say how many of them are padding. If row b is still "
        "sample b of a padded batch, say so: dpscope.flash.same_rows(new, batch); other cases are in docs/padding.md"
    )


class ForwardPasses:
    """Forward passes of a model: they open micro-batches, and are verified.

    `close` closes the micro-batch and adds its sums to those before it. `abandon` drops those of an open logical batch.
    `retap` taps some modules, or all, in the next way of the ladder.
    """

    def __init__(
        self,
        model: nn.Module,
        state: StepState,
        verification: Verification,
        *,
        close: Callable[[], None],
        abandon: Callable[[], None],
        retap: Callable[[NotFollowed], bool],
        batch_size_of: BatchSizeOf | None,
        budget: MemoryBudget,
        ranks: Ranks,
    ) -> None:
        self.model = model
        self.state = state
        self.batch_size_of = batch_size_of
        self.rerunning = False  # checkpointed blocks run again, after backward
        self.blocks: WatchedBlocks | None = None
        self._budget = budget
        self._close = close
        self._abandon = abandon
        self.expects_padding = False  # batches come from a padded loader
        self._rows: Rows | None = None  # of the root's forward pass that runs
        self._retap = retap
        self._verification = verification
        self._ranks = ranks
        self.refresh: Callable[[], bool] = bool  # of the attachment
        self._first_misfit = ""  # why a module could not be tapped as it was, where another way is being tried
        self._first_given: list[weakref.ref[Tensor]] = []  # what the first forward pass of the micro-batch was given
        self._warned_of_others = False
        self.hooks: Hooks | None = None  # on saved tensors, where the root's forward began
        self.in_trial = False
        self.samples_tried = 0  # a number for the samples of a trial: another one for other samples
        self.is_made_up = False  # the micro-batch: this process has no sample in it
        self._depth = 0  # of calls of the root's forward
        self._again = False  # whether the outermost of them is a checkpoint that runs again
        self._unknown: list[UnknownCall] = []  # of this forward

    @property
    def can_begin_again(self) -> bool:
        """True if the root's forward runs for the first time, and may run again with other taps."""
        return self._depth > 0 and not self._again

    @contextmanager
    def trial(self) -> Iterator[list[UnknownCall]]:
        """Run the model's own forward for a trial, as if the root had been called.

        It yields the calls of layers whose rows are not known to be samples.
        """
        before = self._unknown, self.in_trial
        unknown: list[UnknownCall] = []
        self._unknown, self.in_trial = unknown, True
        self._depth += 1
        try:
            yield unknown
        finally:
            self._depth -= 1
            self._unknown, self.in_trial = before

    def begin_replay(self, rows: Rows | None) -> bool:
        """Begin a micro-batch that a graph will run. Return False if it is due for a check and has to run eagerly."""
        self.close_recorded()
        self._meet_draw(rows)
        return not self.refresh() and self._verification.schedule.count_replay()

    def close_recorded(self) -> None:
        """Close the micro-batch before a forward pass that follows a backward pass."""
        if self.state.recorded and not self.in_trial and not self.runs_again():
            self.state.fail_unfinished()
            if self.state.recorded:
                self._close()

    def runs_again(self) -> bool:
        """Return whether a forward pass now would be a checkpoint that runs again."""
        return self.rerunning or in_backward()

    # -- the root ----------------------------------------------------------------------------------------------------

    def call_root(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        instead: Callable[..., Any] | None = None,
    ) -> Any:
        """Run the root's forward with gradients enabled. A new kind of call is verified first.

        instead  what is called in its place; verification calls the forward
        """
        if self._depth == 0:
            refuse_capture()
            self._rows, (args, kwargs) = self._take_rows(args, kwargs)
        self._ranks.refuse_wrapper()
        call = RootCall(forward, args, kwargs, self._count(args, kwargs), instead)
        if self._depth or (not self._ranks.several and call.batch and not self.is_made_up):
            return self._call_root(call)
        self.close_recorded()  # the micro-batch before, of which `is_made_up` still speaks
        told = self._verification.numbers.in_empty((args, kwargs)) if call.batch == 0 else ()
        made_up = make_up_sample(args, kwargs, told) if call.batch == 0 else None
        self.is_made_up = False
        if made_up is None:
            return self._call_root(call)
        if not self._ranks.several:
            try:
                return self._call_root(call)  # many models can take none
            except UserError:
                raise
            except (RuntimeError, ValueError, IndexError):
                pass
        self.is_made_up = True
        return without_rows(self._call_root(RootCall(forward, *made_up, self._count(*made_up))))

    def _take_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Rows | None, Any]:
        """Return the rows of a call that are samples, if its batch is padded, and the call with plain tensors."""
        if not self.expects_padding and not has_marks(args, kwargs):
            return None, (args, kwargs)
        rows = rows_in((args, kwargs))
        count = self._count(args, kwargs)
        if rows is None:
            if self.expects_padding and not (self.runs_again() and self.state.rows is not None):
                refuse_unknown_rows(count)
        elif rows.size != count:
            raise UserError(
                f"the model was called with {count} samples, made of a padded batch of {rows.size} rows: which of them "
                "are padding is not known; call it with the rows that the loader gave"
            )
        self._meet_draw(rows)
        return rows, without_marks((args, kwargs))

    def _meet_draw(self, rows: Rows | None) -> None:
        """Drop the sums of another draw, of which the rest was left out."""
        if self.state.leaves_out_rest(rows):
            self._abandon()
        self.state.meet(rows)

    def _call_root(self, call: RootCall) -> Any:
        self.close_recorded()
        again = self.runs_again()
        outermost = self._depth == 0
        if outermost and in_reentrant_checkpoint():
            raise UserError(
                "the whole model runs in a reentrant checkpoint, whose forward pass has no gradients: it is not known "
                "which passes belong to one backward, so pass use_reentrant=False to checkpoint(), or checkpoint blocks"
            )
        instead = None if call.instead is None else self._settled(call.instead)
        call = call._replace(forward=self._settled(call.forward), instead=instead)
        if outermost and not again and not self._warned_of_others:
            self._compare_with_first(call)
        if self.state.micro_batch is CLOSED:
            self._budget.begin_forward()
            if self.blocks is not None:
                self.blocks.begin_micro_batch()
        self.state.open(call.batch, rows=self._rows, in_backward=again)
        if outermost and not again and own_capture() is None:
            self._verification.schedule.begin_pass()
            if self.refresh():
                self._verification.schedule.begin_again()
                return self.model.forward(*call.args, **call.kwargs)
        if not outermost or again:
            return self._run(call, outermost, again)
        try:
            with uncached_parametrizations():
                output = self._run(call, outermost, again)
            self._first_misfit = ""
            return output
        except NotFollowed as end:
            self._first_misfit = self._first_misfit or str(end)  # the nearest to what the user wrote
            if not self._retap(end):
                first, self._first_misfit = self._first_misfit, ""
                raise UserError(self._verification.doubt or first) from None
        self._verification.schedule.begin_again()
        given = call.args, call.kwargs
        args, kwargs = given if self._rows is None else mark_batch(given, self._rows)
        return self.model.forward(*args, **kwargs)  # by the taps that are there now

    def _compare_with_first(self, call: RootCall) -> None:
        """Warn if a second forward pass before backward has other data: two views, or two batches."""
        given = [leaf for leaf in leaves_in((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
        if self.state.micro_batch is CLOSED or not self._first_given:
            self._first_given = [weakref.ref(leaf) for leaf in given]
            return
        before = [leaf for reference in self._first_given if type(leaf := reference()) is Tensor]
        if len(before) != len(given) or any(type(leaf) is not Tensor for leaf in given):
            return  # a dry run, or a tensor that is gone with its pass
        if not all(a is b or (a.shape == b.shape and torch.equal(a, b)) for a, b in zip(before, given, strict=True)):
            self._warned_of_others = True
            warnings.warn(
                "the model was called again before a backward pass, with other data: row b of both calls is taken to "
                "be the same sample, as in two views of it. If these are two batches, call backward() after each",
                stacklevel=8,
            )

    def _run(self, call: RootCall, outermost: bool, again: bool) -> Any:
        forward, args, kwargs, _, instead = call
        above = self._budget.above
        with self._verifying():
            begun = self._verification.begin(call) if outermost and not again else None
        if begun is not None and begun.verified:
            self._budget.begin_again(above)
        self._again = again if outermost else self._again
        self._depth += 1
        try:
            # The checkpoints of what is called instead are not torch's: what their layers leave is held.
            watched = outermost and not again and instead is None
            with self.blocks.watching() if self.blocks is not None and watched else nullcontext():
                output = (instead or forward)(*args, **kwargs)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception:
            if begun is not None:
                self._verification.refuse_failed(begun, self._unknown, self._first_misfit)
            raise
        finally:
            self._depth -= 1
            unknown = self._unknown
            if outermost:
                self._unknown = []
        with self._verifying():
            if begun is not None:
                self._verification.end(begun, unknown, output)
            elif outermost:
                self._verification.settle(unknown, call)
        return output

    @contextmanager
    def _verifying(self) -> Iterator[None]:
        """Hide verification from hooks on saved tensors. If memory runs out in it, that is the error."""
        try:
            with without_hooks():
                yield
        except RanOutOfMemory as end:
            raise end.error from None

    def _settled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward with proxies in its output replaced by ordinary tensors."""
        if not self._verification.followed or self._depth:
            return forward

        def settled(*args: Any, **kwargs: Any) -> Any:
            self.hooks = current_hooks()
            output = forward(*args, **kwargs)
            tensors = tensors_in(output)
            if not any(isinstance(tensor, Proxy) for tensor in tensors):
                return output
            if any(tensor.requires_grad and not isinstance(tensor, Proxy) for tensor in tensors):  # rows of samples
                return replace_leaves(output, lambda x: x.returned() if isinstance(x, Proxy) else x, scalars=True)
            return replace_leaves(output, lambda x: x.samples() if isinstance(x, Proxy) else x)

        return settled

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the number of samples of a call."""
        if self.batch_size_of is not None:
            return self.batch_size_of(args, kwargs)
        leaves = leaves_in((args, kwargs))
        if not leaves:
            raise UserError(
                "the number of samples is not known: there is no tensor in what the model was called with; say it with "
                "batch_size_of (of FlashEngine or make_private), a function of the call's args and kwargs"
            )
        if isinstance(leaves[0], Tensor) and leaves[0].is_nested:
            raise UserError(f"the model was given a nested tensor, {NEEDS_DENSE}")
        return rows_of(leaves[0])

    def size(self) -> int | None:
        return self.state.size_in_backward if in_backward() else self.state.batch_size

    # -- layers ------------------------------------------------------------------------------------------------------

    def admit(self, tap: SampledLayer, x: Tensor) -> Tensor:
        """Check a layer's input if it is not the usual one: a new micro-batch, a broadcast input, a wrong shape."""
        self.close_recorded()
        if torch._C._functorch.maybe_get_level(x) > 0:
            raise tap.does_not_fit(
                f"{tap.name} was called inside a transform of torch.func (vmap, grad), where its samples cannot be "
                "told; call it with the whole batch"
            )
        tap.admit(x)
        batch = self.batch_for(tap, (x,), {})
        size = x.shape[0]
        shared = size == 1 != batch
        if size != batch and not shared:
            reason = (
                f"{tap.name} was given a tensor of shape {tuple(x.shape)} in a batch of {batch} samples: "
                f"{KEEP_BATCH_FIRST}"
            )
            raise NotFollowed([tap.module], reason) if self.can_begin_again else UserError(reason)
        self.admit_call(tap, x.dim(), shared=shared)
        return x.expand(batch, *x.shape[1:]) if shared else x

    def batch_for(self, tap: Sampled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the number of samples, known from the root's forward; outside of it, from `batch_size_of`."""
        self.close_recorded()
        known = self.size()
        if self._depth == 0 and self.batch_size_of is not None and not self.runs_again():
            if self.expects_padding or has_marks(args, kwargs):
                raise UserError(
                    f"{tap.name} was called outside of the model's own forward with a padded batch: which rows are "
                    "padding is told by what the model itself is called with; call the model, or leave out pad_batches"
                )
            size = self.batch_size_of(args, kwargs)
            if known not in (None, size):
                raise UserError(
                    f"{tap.name} was called with {size} samples after a forward pass of {known}: forward "
                    "passes before a backward pass are about the same samples"
                )
            self.state.open(size)
            return size
        if known is None:
            raise UserError(
                f"{tap.name} was called outside of the model's own forward, so the number of samples is not known: "
                "call the model itself, or give batch_size_of, a function of the layer's args and kwargs"
            )
        return known

    def admit_call(self, tap: Sampled, dim: int, *, shared: bool) -> None:
        """Accept a call whose rows are known to be samples; record any other, to be verified after the forward."""
        if (self.size() or 0) < 2 or dim in (tap.shared if shared else tap.known):
            return
        if self._depth:
            self._unknown.append(UnknownCall(tap, dim, shared))
        elif self.batch_size_of is None or shared:
            raise UserError(
                f"{tap.name} was called outside of the model's own forward with what was not seen there: whether its "
                "rows are the samples is not known; call the model itself"
            )
