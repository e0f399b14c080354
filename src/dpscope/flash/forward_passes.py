"""Forward passes of a model with an engine: how many samples they have, and whether rows are samples.

The root's forward tells the number of samples; layers are let in where it is known that row b of what they are given
belongs to sample b. The first time the root is called in some way, its forward is rehearsed to find that out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash.arguments import KEEP_BATCH_FIRST, leaves_in, replace_leaves, rows_of, signature, tensors_in
from dpscope.flash.compiled.captures import refuse_capture
from dpscope.flash.distributed import refuse_ddp_forward
from dpscope.flash.memory_budget import MemoryBudget
from dpscope.flash.module_state import BufferWatch
from dpscope.flash.padding.rows import Rows, has_marks, mark_batch, rows_in, without_marks
from dpscope.flash.ranks.empty_shares import make_up_sample, without_rows
from dpscope.flash.ranks.layout import compiled_over_ranks
from dpscope.flash.ranks.ranks import Ranks
from dpscope.flash.rehearsal import Rehearsal, RootCall
from dpscope.flash.rehearsal_run import ParametersUsed, Run, Sampled
from dpscope.flash.stand_in import NotFollowed, StandIn
from dpscope.flash.step_state import CLOSED, StepState
from dpscope.flash.torch_version import require_for_compiled

MOST_WAYS = 64
"""In which a model is called, as far as they are remembered."""

BatchSizeOf = Callable[[tuple[Any, ...], dict[str, Any]], int]  # of a call's args and kwargs


class SampledLayer(Sampled, Protocol):
    def admit(self, x: Tensor) -> None:
        """Raise where x has no room for a batch dimension in front."""


class WatchedBlocks(Protocol):
    """Checkpointed blocks that are noted in forward passes."""

    def begin_micro_batch(self) -> None: ...

    def watching(self) -> AbstractContextManager[None]: ...


def in_backward() -> bool:
    """Whether autograd is running a backward pass: a forward in it is that of a checkpoint, run again."""
    return torch._C._current_graph_task_id() != -1


def nodes_behind(tensors: list[Tensor]) -> list[Any]:
    """The nodes of autograd's graph that tensors come from."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, found = set(nodes), []
    while nodes:
        node = nodes.pop()
        found.append(node)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


def leaves_behind(tensors: list[Tensor]) -> list[Tensor]:
    """The leaves that autograd reaches from tensors."""
    return [node.variable for node in nodes_behind(tensors) if hasattr(node, "variable")]


def refuse_unknown_rows(count: int) -> NoReturn:
    raise UserError(
        f"the model was called with {count} rows that do not say how many of them are padding, as the batches of a "
        "padded loader do: copies (.to), arithmetic, columns (x[:, 1:]) and reshaping keep that, and what may reorder "
        "rows does not. If row b is still sample b, say so: dpscope.flash.same_rows(new, batch). For batches of your "
        "own there is dpscope.flash.pad_batch; evaluate under torch.no_grad()"
    )


class ForwardPasses:
    """`close`: closes the micro-batch, adding its sums to those before it.

    `abandon`: drops the sums of a logical batch that is not complete.
    `follow_less`: has some modules run sample by sample from now on, given with a reason; all, if none is given.
    `begin_way`: called before the root runs in a way that was not rehearsed.
    """

    def __init__(
        self,
        model: nn.Module,
        state: StepState,
        *,
        close: Callable[[], None],
        abandon: Callable[[], None],
        follow_less: Callable[[Sequence[nn.Module], str], None],
        begin_way: Callable[[], None],
        batch_size_of: BatchSizeOf | None,
        budget: MemoryBudget,
        buffers: BufferWatch,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model
        self._modules = list(model.modules())
        self.state = state
        self.batch_size_of = batch_size_of
        self.run: Run | None = None  # of a rehearsal
        self.rerunning = False  # checkpointed blocks run again, after backward
        self.blocks: WatchedBlocks | None = None
        self._budget = budget
        self._close = close
        self._abandon = abandon
        self.expects_padding = False  # batches come from a padded loader
        self._rows: Rows | None = None  # of the root's forward pass that runs
        self._follow_less = follow_less
        self._begin_way = begin_way
        self.buffers = buffers
        self._ranks = ranks
        self.is_made_up = False  # the micro-batch: this rank has no sample in it
        self._depth = 0  # of calls of the root's forward
        self._rehearsed: dict[Any, None] = {}  # ways in which the root was called, in order
        self._warned_of_ways = False
        self.followed: list[nn.Module] = []  # modules whose own parameters are followed (layers/bare.py)
        self.held_by_graphs: set[nn.Parameter] = set()  # parameters of tapped layers that ran in compiled graphs
        self._searched: set[Any] = set()  # ways of calling the root in which no parameter is reached past its taps
        self._unknown: list[tuple[Sampled, int, bool]] = []  # calls of this forward that no rehearsal has seen

    @contextmanager
    def rehearsing(self, run: Run) -> Iterator[None]:
        """Inside, taps tell `run` what they are given."""
        outer, self.run = self.run, run
        try:
            communication = nullcontext() if self._ranks is None else self._ranks.rehearsing()
            with self.state.rehearsing(run.batch), communication:
                if not self.followed:
                    yield
                    return
                with ParametersUsed(run) as used:
                    yield
        finally:
            self.run = outer
        self._begin_again_without(used.found, "a layer's parameter is used outside of the layer")

    @property
    def can_begin_again(self) -> bool:
        """Whether the root's forward runs for the first time, and may be run anew with other taps."""
        return (self._depth > 0 or self.run is not None) and not self.runs_again()

    def forget(self) -> None:
        """What rehearsals have shown: there are other taps now."""
        self._rehearsed.clear()
        self._searched.clear()
        self._unknown = []

    def _close_recorded(self) -> None:
        """A forward pass after a backward pass begins a new micro-batch."""
        if self.state.recorded and not self.runs_again():
            self._close()

    def runs_again(self) -> bool:
        """Whether a forward pass now is that of a checkpoint, run again."""
        return self.rerunning or in_backward()

    # -- the root ----------------------------------------------------------------------------------------------------

    def call_root(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compiled: Callable[..., Any] | None = None,
    ) -> Any:
        """The root's forward, gradients enabled; the first time it is called in some way it is rehearsed.

        compiled  what is called in its place; rehearsals call the forward
        """
        if self._depth == 0:
            refuse_capture()
            self._rows, (args, kwargs) = self._take_rows(args, kwargs)
        if self._ranks is None:
            refuse_ddp_forward()
            if compiled is not None:
                require_for_compiled()
        elif compiled is not None:
            raise compiled_over_ranks("")
        elif self._depth == 0:
            self._close_recorded()  # the micro-batch before, of which `is_made_up` still speaks
            call = make_up_sample(args, kwargs) if self._count(args, kwargs) == 0 else None
            self.is_made_up = call is not None
            if call is not None:
                return without_rows(self._call_root(forward, *call, compiled))
        return self._call_root(forward, args, kwargs, compiled)

    def _take_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Rows | None, Any]:
        """Which rows of a call are samples, if its batch is padded, and the call with plain tensors."""
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
        if self.state.leaves_out_rest(rows):
            self._abandon()
        return rows, without_marks((args, kwargs))

    def _call_root(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compiled: Callable[..., Any] | None,
    ) -> Any:
        self._close_recorded()
        again = self.runs_again()
        outermost = self._depth == 0
        real = None if compiled is None else self._settled(compiled)
        call = RootCall(self._settled(forward), args, kwargs, self._count(args, kwargs), real)
        if self.state.micro_batch is CLOSED:
            self._budget.begin_forward()
            if self.blocks is not None:
                self.blocks.begin_micro_batch()
        self.state.open(call.batch, rows=self._rows, in_backward=again)
        if not outermost or again or not self.followed:
            return self._run(call, outermost, again)
        try:
            return self._run(call, outermost, again)
        except UserError as refusal:
            self._follow_less((), str(refusal).partition(". ")[0])
        except NotFollowed as end:
            self._follow_less(end.modules, str(end))
        if self._rows is not None:
            args, kwargs = mark_batch((args, kwargs), self._rows)
        return self.model.forward(*args, **kwargs)  # by the taps that are there now

    def _modes(self) -> tuple[bool, ...]:
        """train() or eval() of every module: what a forward does with its samples may hang on any of them."""
        return tuple([module.training for module in self._modules])

    def _run(self, call: RootCall, outermost: bool, again: bool) -> Any:
        failure: Exception | None = None
        forward, args, kwargs, _, compiled = call
        way = (signature((args, kwargs)), self._modes()) if outermost and not again else None
        if way is not None and way not in self._rehearsed:
            self._begin_way()
            if call.batch > 1:
                failure = self._rehearse(call)
                self._remember(way)
        buffers = self.buffers.look()
        self._depth += 1
        try:
            # The checkpoints of a compiled forward are the compiler's: what their layers leave is held.
            watched = not again and compiled is None
            with self.blocks.watching() if self.blocks is not None and watched else nullcontext():
                output = (compiled or forward)(*args, **kwargs)
        finally:
            self._depth -= 1
            unknown = self._unknown
            if outermost:
                self._unknown = []
        if outermost and not again:
            changed = self.buffers.changed(buffers)
            if changed:
                self._judge_buffers(changed, call)
        if outermost and unknown:
            self._settle(unknown, failure or self._rehearse(call))
        if way is not None and self.followed and way not in self._searched:
            self._search_past_taps(output)
            if len(self._searched) >= MOST_WAYS:
                self._searched.clear()
            self._searched.add(way)
        return output

    def _remember(self, way: Any) -> None:
        """Of a way that is forgotten samples are only told from other rows once more."""
        self._rehearsed[way] = None
        if len(self._rehearsed) < MOST_WAYS:
            return
        del self._rehearsed[next(iter(self._rehearsed))]
        if not self._warned_of_ways:
            self._warned_of_ways = True
            warnings.warn(
                f"the model was called in {MOST_WAYS} ways, which differ in their numbers, options or modes. Each new "
                "one is tried out before it is trained on, for samples may mix in it, and that takes longer than a "
                "step: give it numbers that change from step to step as tensors",
                stacklevel=2,
            )

    def _settled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward, with ordinary tensors for stand-ins that it gives back."""
        if not self.followed or self._depth:
            return forward

        def settled(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if not any(isinstance(leaf, StandIn) for leaf in leaves_in(output)):
                return output
            return replace_leaves(output, lambda leaf: leaf.samples() if isinstance(leaf, StandIn) else leaf)

        return settled

    def _search_past_taps(self, output: Any) -> None:
        """Find parameters that autograd reaches from the output as in ordinary training, past all taps."""
        reached = {tensor for tensor in leaves_behind(tensors_in(output)) if isinstance(tensor, nn.Parameter)}
        # A compiled graph has them as inputs, whatever it does with them: an ordinary gradient of one will be refused.
        reached -= self.held_by_graphs
        self._begin_again_without(reached, "a parameter is used where that cannot be followed")

    def _begin_again_without(self, parameters: Collection[nn.Parameter], reason: str) -> None:
        modules = [module for module in self.followed if any(p in parameters for p in module.parameters())]
        if modules:
            raise NotFollowed(modules, reason)

    def _count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The number of samples of a call."""
        if self.batch_size_of is not None:
            return self.batch_size_of(args, kwargs)
        leaves = leaves_in((args, kwargs))
        if not leaves:
            raise UserError(
                "the number of samples is not known: there is no tensor in what the model was called with; say it with "
                "batch_size_of (of FlashEngine or make_private), a function of the call's args and kwargs"
            )
        return rows_of(leaves[0])

    def _judge_buffers(self, paths: list[str], call: RootCall) -> None:
        """Refuse buffers that forward changes differently when a sample is replaced."""
        seen: list[list[Tensor | None]] = []

        def observed(*args: Any, **kwargs: Any) -> Any:
            output = call.forward(*args, **kwargs)
            seen.append(self.buffers.values(paths))
            return output

        if call.batch:
            self._rehearsal(call._replace(forward=observed)).run_with_others()
        for index, path in enumerate(paths):
            self.buffers.judge(path, [values[index] for values in seen])

    def _rehearse(self, call: RootCall) -> Exception | None:
        """Rehearse the call; the error that kept it from being run, if there was one."""
        try:
            self._rehearsal(call).judge()
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return error
        return None

    def _rehearsal(self, call: RootCall) -> Rehearsal:
        return Rehearsal(call, self.model, self.rehearsing, in_any_dim=self.batch_size_of is not None)

    def _settle(self, unknown: list[tuple[Sampled, int, bool]], failure: Exception | None) -> None:
        for tap, dim, shared in unknown:
            if dim not in (tap.shared if shared else tap.known):
                reason = f"the forward could not be run again to find out: {failure}" if failure else "it changes"
                raise UserError(
                    f"whether the rows of what {tap.name} was given are the samples is not known ({reason}): "
                    f"{KEEP_BATCH_FIRST}"
                )

    def size(self) -> int | None:
        return self.state.size_in_backward if in_backward() else self.state.batch_size

    # -- layers ------------------------------------------------------------------------------------------------------

    def admit(self, tap: SampledLayer, x: Tensor) -> Tensor:
        """Check a layer's input where it is not the usual one: a new micro-batch, a broadcast input, a wrong shape."""
        self._close_recorded()
        if torch._C._functorch.maybe_get_level(x) > 0:
            raise UserError(
                f"{tap.name} was called inside a transform of torch.func (vmap, grad), where its samples cannot be "
                "told; call it with the whole batch"
            )
        tap.admit(x)
        batch = self.batch_for(tap, (x,), {})
        size = x.shape[0]
        shared = size == 1 != batch
        if size != batch and not shared:
            raise UserError(
                f"{tap.name} was given a tensor of shape {tuple(x.shape)} in a batch of {batch} samples: "
                f"{KEEP_BATCH_FIRST}"
            )
        self.admit_unit(tap, x.dim(), shared=shared)
        return x.expand(batch, *x.shape[1:]) if shared else x

    def batch_for(self, tap: Sampled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The number of samples, which the root's forward tells; outside of it, `batch_size_of`."""
        self._close_recorded()
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
                f"{tap.name} was called outside of the model's own forward: the number of samples is not known; "
                "call the model itself, or say it with batch_size_of (of FlashEngine or make_private), which is then "
                "asked with the args and kwargs of each layer called so"
            )
        return known

    def admit_unit(self, tap: Sampled, dim: int, *, shared: bool) -> None:
        """Accept a call whose rows are known to be samples; note any other, to be rehearsed after the forward."""
        if self.run is not None or (self.size() or 0) < 2 or dim in (tap.shared if shared else tap.known):
            return
        if self._depth:
            self._unknown.append((tap, dim, shared))
        elif self.batch_size_of is None or shared:
            raise UserError(
                f"{tap.name} was called outside of the model's own forward with what was not seen there: whether its "
                "rows are the samples is not known; call the model itself"
            )
