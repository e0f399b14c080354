"""Record of all rehearsals: which calls of the root were rehearsed, and what its forward passes may not do.

The root is called in one way as long as the shapes, numbers and options that it is given and the modes of its modules
are the same. The first time it is called in some way, that call is rehearsed (rehearsal.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack

from dpscope.errors import UserError
from dpscope.flash.ranks.ranks import Ranks
from dpscope.flash.sample_rows.mixing import Mixing
from dpscope.flash.sample_rows.proxy import Mismatch, NotFollowed
from dpscope.flash.sample_rows.rehearsal import Rehearsal
from dpscope.flash.sample_rows.rehearsal_run import ParametersUsed, Run, Sampled
from dpscope.flash.sample_rows.schedule import LookSchedule
from dpscope.flash.sample_rows.self_test import SelfTest, TestedEngine
from dpscope.flash.sample_rows.tried_call import RootCall
from dpscope.flash.step.step_state import StepState
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.arguments import KEEP_BATCH_FIRST, leaves_in, signature, tensors_in
from dpscope.flash.torch_side.autograd_graph import leaves_behind
from dpscope.flash.torch_side.captures import own_capture
from dpscope.flash.torch_side.module_state import BufferWatch, OptionWatch
from dpscope.flash.torch_side.saved_tensor_hooks import current_hooks

MOST_WAYS = 64
"""In which a model is called, as far as they are remembered."""


class NotVerified(UserError):
    """A call in a capture of a kind that could not be verified before: it has to run eagerly."""


class UnknownCall(NamedTuple):
    """A call of a layer, or of a unit, that no rehearsal has seen: `dim` dimensions, one row for all if `shared`."""

    tap: Sampled
    dim: int
    shared: bool


class BegunPass(NamedTuple):
    """A forward pass of the root that begins. `failure`: what kept it from being rehearsed just now."""

    call: RootCall
    way: object
    buffers: list[tuple[Tensor | None, int]]
    failure: Exception | None
    verified: bool = False


class _Reading(NamedTuple):
    """Facts about one way to call the model: `RehearsedCalls._shared` and `_output_dims`."""

    shared: frozenset[int]
    output_dims: list[int | None] | None


class RehearsedCalls:
    """Calls of the model that were rehearsed, and what was found in them.

    begin_way   called before the root runs in a way that was not rehearsed
    in_any_dim  whether an argument may have its samples in another dimension than the first
    """

    def __init__(
        self,
        engine: TestedEngine,
        state: StepState,
        *,
        begin_way: Callable[[], None],
        in_any_dim: bool,
        ranks: Ranks | None,
    ) -> None:
        self.run: Run | None = None  # of the rehearsal that runs
        self.followed: list[nn.Module] = []  # modules whose own parameters are followed (layers/bare.py)
        self.expanded: set[nn.Module] = set()  # layers that were given a row of parameters, expanded to all samples
        model = engine.model
        self.schedule = LookSchedule()
        self.buffers = BufferWatch(model, ())
        self.options = OptionWatch(model)
        self.held_by_graphs: set[nn.Parameter] = set()  # parameters of tapped layers that ran in compiled graphs
        self._engine, self._model, self._state, self._ranks = engine, model, state, ranks
        self.modules = list(model.modules())
        self._begin_way = begin_way
        self._in_any_dim = in_any_dim
        self._rehearsed: dict[object, _Reading] = {}  # ways in which the root was called, in order
        self._searched: set[object] = set()  # ways in which no parameter is reached past its taps
        self._asked: object = None  # the way, and the pass, of which it was found that samples do not mix
        self._warned_of_ways = False
        self._shared: frozenset[int] = frozenset()  # of the way: tensors with as many rows by chance
        self.doubt = ""  # of the way: samples mix, unless an argument is shared by all of them
        self._output_dims: list[int | None] | None = None  # of the way: dimensions of samples in outputs, if known

    @contextmanager
    def rehearsing(self, run: Run) -> Iterator[None]:
        """Make taps record their inputs in `run` inside the block."""
        outer, self.run = self.run, run
        try:
            communication = nullcontext() if self._ranks is None else self._ranks.rehearsing()
            with self._state.rehearsing(run.batch), communication:
                if not self.followed:
                    yield
                    return
                with ParametersUsed(run) as used:
                    yield
        finally:
            self.run = outer
        self._begin_again_without(used.found, "a layer's parameter is used outside of the layer")

    def forget(self) -> None:
        """Forget the results of rehearsals, because the taps have changed."""
        self.expanded.clear()
        self._rehearsed.clear()
        self._searched.clear()

    # -- a forward pass of the root ----------------------------------------------------------------------------------

    def begin(self, call: RootCall) -> BegunPass:
        """Rehearse the call, if it is the first of its way."""
        # train() or eval() of every module: what a forward does with its samples may hang on any of them
        # and so may modes of torch functions that are active
        modes = tuple(map(type, _get_current_function_mode_stack()))  # type: ignore[no-untyped-call]
        trained = tuple([module.training for module in self.modules])
        way = signature((call.args, call.kwargs)), trained, modes, call.batch > 1  # one sample shows nothing of several
        failure, verified = None, False
        if self._is_dry(call):
            if (run := dry_run.current()) is not None and run.verifies:
                failure, verified = self._verify(call, way), True
            return BegunPass(call, way, self.buffers.look(), failure, verified)
        if own_capture() is not None:
            if way not in self._rehearsed:
                raise NotVerified("all samples of the batch are the same, which shows nothing of several")
            return BegunPass(call, way, self.buffers.look(), None)
        if self.options.has_changed() or way not in self._rehearsed:
            self._begin_way()
            if call.batch:
                failure, verified = self._verify(call, way), True
                if self._mixing(call).has_different_samples():
                    self._remember(way)
        elif self.schedule.is_due(call.batch):
            self._shared, self._output_dims = self._rehearsed[way]
            failure, verified = self._look_again(call), True
            self._rehearsed[way] = _Reading(self._shared, self._output_dims)
        return BegunPass(call, way, self.buffers.look(), failure, verified)

    @staticmethod
    def _is_dry(call: RootCall) -> bool:
        """Return whether the call is a dry run on fake tensors, which have no values to look at."""
        return any(isinstance(leaf, FakeTensor) for leaf in leaves_in((call.args, call.kwargs)))

    def end(self, begun: BegunPass, unknown: list[UnknownCall], output: Any) -> None:
        """Refuse what the pass did wrong: buffers made of samples, rows that are no samples, parameters past taps."""
        self.options.note()  # what forward itself has changed
        changed = self.buffers.changed(begun.buffers)
        if own_capture() is not None and (lost := [*changed, *self.buffers.replaced(begun.buffers)]):
            raise UserError(f"{lost[0]} is a buffer that forward changes")
        if changed:
            self._judge_buffers(changed, begun.call)
        if begun.failure is not None:
            raise UserError(
                f"the model's forward ran, but could not be run again to verify it ({begun.failure}): its samples may "
                "mix. A forward must give the same when it is called again with the same arguments"
            ) from begun.failure
        self.settle(unknown, begun.call)
        if self.followed and begun.way not in self._searched:
            self._search_past_taps(output)
            if len(self._searched) >= MOST_WAYS:
                self._searched.clear()
            self._searched.add(begun.way)

    def settle(self, unknown: list[UnknownCall], call: RootCall, failure: Exception | None = None) -> None:
        """Refuse a pass with layers whose rows are not known to be samples."""
        if not unknown:
            return
        if dry_run.current() is not None:
            _note_known(unknown)
            return
        failure = failure or self._try_rows(call)
        for tap, dim, shared in unknown:
            if dim not in (tap.shared if shared else tap.known):
                reason = f"the forward could not be run again to find out: {failure}" if failure else "it changes"
                raise UserError(
                    f"whether the rows of what {tap.name} was given are the samples is not known ({reason}): "
                    f"{KEEP_BATCH_FIRST}"
                )

    def _remember(self, way: object) -> None:
        """Record a way of calling the model. If one is forgotten, it is rehearsed again."""
        self._rehearsed[way] = _Reading(self._shared, self._output_dims)
        if len(self._rehearsed) < MOST_WAYS:
            return
        del self._rehearsed[next(iter(self._rehearsed))]
        if not self._warned_of_ways:
            self._warned_of_ways = True
            warnings.warn(
                f"the model was called in {MOST_WAYS} ways, which differ in their numbers, options or modes, and each "
                "new one is verified, which is slow: give it numbers that change from step to step as tensors",
                stacklevel=2,
            )

    def _verify(self, call: RootCall, way: object) -> Exception | None:
        """Verify the call; return the error that kept it from being run, if there was one.

        Samples do not mix in the untouched model (mixing.py), and the self-test proves that the taps do what that
        model does. Where it fails or cannot tell, a rehearsal finds the layer whose rows are not the samples.

        If the pass begins again with other taps, the untouched model is not asked again.
        """
        asked = way, self.schedule.passes
        try:
            if asked != self._asked:
                self._shared, self._output_dims, self.doubt = frozenset(), None, ""
                mixing = self._mixing(call)
                if call.batch > 1:
                    self._draw(mixing, call)
                mixing.find_carried_state()
                self._asked = asked
            self._hold_against_model(call)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self.expanded:
                raise NotFollowed(list(self.expanded), "it is given a tensor that is made of parameters") from error
            return error
        return None

    def _draw(self, mixing: Mixing, call: RootCall) -> None:
        try:
            mixing.draw()
        except UserError:
            with suppress(NotFollowed):
                self._find_rows(call)  # it may name the layer
            raise
        self._shared, self._output_dims, self.doubt = mixing.shared, mixing.output_dims, mixing.doubt

    def _hold_against_model(self, call: RootCall) -> None:
        """Run the self-test. If it fails or is not conclusive, rehearse the call, which may name the layer."""
        misfit: BaseException | None = None
        try:
            if self._self_test(call) or call.batch == 1:
                return
        except torch.OutOfMemoryError:
            raise
        except (Exception, Mismatch) as error:
            if call.batch == 1:
                raise
            misfit = error
        shared = self._shared
        self._find_rows(call, misfit.suspects if isinstance(misfit, Mismatch) else ())
        if misfit is not None and self._shared == shared:
            raise misfit  # not tested anew: on other rows it may hold by chance
        if misfit is not None:
            self._self_test(call)

    def _find_rows(self, call: RootCall, suspects: Sequence[nn.Module] = ()) -> None:
        """Rehearse the call: note which rows of which layer are the samples, and refuse those that are not."""
        if dry_run.current() is not None:
            return
        rehearsal = Rehearsal(call, self._model, self.rehearsing, in_any_dim=self._in_any_dim, shared=self._shared)
        rehearsal.suspects = suspects
        rehearsal.judge()
        self._shared = rehearsal.shared

    def _try_rows(self, call: RootCall) -> Exception | None:
        """Rehearse a call that reached layers which the self-test had not; return the error that prevented it."""
        try:
            self._find_rows(call)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return error
        return None

    def _look_again(self, call: RootCall) -> Exception | None:
        """Check some rows of a call whose way was verified before."""
        try:
            whole = self.schedule.note_look()
            mixing = self._mixing(call)
            if call.batch > 1:
                mixing.look_again()
                self._shared = mixing.shared
            if whole:
                mixing.find_carried_state()
                self._self_test(call)
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            return error
        return None

    def _self_test(self, call: RootCall) -> bool:
        """Compare the taps with the untouched model; return whether that proves that rows are samples.

        A sharded model's weights are elsewhere: it is not tested here.
        """
        if self._is_sharded:
            return False
        tried = self._mixing(call)
        rows, seed = tried.rows(), self.schedule.passes
        test = SelfTest(self._engine, call, tried.sampled_leaves(), rows, seed=seed, output_dims=self._output_dims)
        # Hooks on saved tensors that are active, say of a checkpoint around the model, are to see nothing of it.
        hidden = nullcontext() if current_hooks() is None else saved_tensors_hooks(lambda x: x, lambda x: x)
        with self._engine.forwards.trial() as unknown, hidden:
            try:
                proven = test.run()
            except RuntimeError:
                if not self._engine.run_by_loop():  # vmap went through forward, and not through backward
                    raise
                proven = test.run()
        if proven:
            _note_known(unknown)
        return proven

    @property
    def _is_sharded(self) -> bool:
        return self._ranks is not None and self._ranks.layout.mesh is not None

    def _mixing(self, call: RootCall) -> Mixing:
        gates = [] if self._is_sharded else self._engine.trained().values()
        found = Mixing(call, self._model, self._alone, gates=gates, in_any_dim=self._in_any_dim, shared=self._shared)
        found.may_repeat = bool(self.followed)  # operators are told apart by their numbers of rows
        return found

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Run the model without taps, and without other processes."""
        communication = nullcontext() if self._ranks is None else self._ranks.rehearsing()
        with self._engine.without_taps(), communication:
            yield

    def _judge_buffers(self, paths: list[str], call: RootCall) -> None:
        """Refuse buffers that forward changes differently when a sample is replaced."""
        seen = self._mixing(call).watch_with_others(lambda: self.buffers.values(paths)) if call.batch else []
        for index, path in enumerate(paths):
            self.buffers.judge(path, [values[index] for values in seen])

    def _search_past_taps(self, output: Any) -> None:
        """Find parameters that autograd reaches from the output as in ordinary training, past all taps."""
        reached = {tensor for tensor in leaves_behind(tensors_in(output)) if isinstance(tensor, nn.Parameter)}
        # A compiled graph has them as inputs, whatever it does with them: an ordinary gradient of one will be refused.
        reached -= self.held_by_graphs
        if reached:
            self._begin_again_without(reached, "a parameter is used where that cannot be followed")
            raise NotFollowed((), "a parameter is used outside of the module that owns it", strays=reached)

    def _begin_again_without(self, parameters: Collection[nn.Parameter], reason: str) -> None:
        modules = [module for module in self.followed if any(p in parameters for p in module.parameters())]
        if modules:
            raise NotFollowed(modules, reason)


def _note_known(calls: list[UnknownCall]) -> None:
    """Note that rows of these calls are the samples, or one row for all of them."""
    for tap, dim, shared in calls:
        (tap.shared if shared else tap.known).add(dim)
