"""Verification of forward passes: that samples do not mix, and that taps do what the model does.

The root is called in one way as long as the numbers of dimensions, numbers and options that it is given, the modes of
its modules, and what requires a gradient are the same. The first time it is called in some way, two questions are asked
about that call: do samples mix in the untouched model (mixing.py), and does the tapped model do what the untouched one
does, sample by sample (self_test.py)? Later calls are looked at now and then (schedule.py), and those that are twice as
large as any before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode_stack

from dpscope.errors import UserError
from dpscope.flash.gradients.slots import OWN_GRADIENTS
from dpscope.flash.ranks.ranks import Ranks
from dpscope.flash.sample_rows.mixing import Mixing
from dpscope.flash.sample_rows.proxy import Mismatch, NotFollowed, Sampled, Unclipped
from dpscope.flash.sample_rows.row_norms import OutputPlace, TestedEngine, losses_left_in
from dpscope.flash.sample_rows.schedule import LookSchedule
from dpscope.flash.sample_rows.self_test import SelfTest
from dpscope.flash.sample_rows.told_numbers import Told, ToldNumbers
from dpscope.flash.sample_rows.tried_call import RootCall
from dpscope.flash.step.step_state import StepState
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.arguments import KEEP_BATCH_FIRST, ArgumentPlace, Leaf, leaves_in, signature, tensors_in
from dpscope.flash.torch_side.autograd_graph import leaves_behind
from dpscope.flash.torch_side.captures import own_capture
from dpscope.flash.torch_side.frames import eagerly
from dpscope.flash.torch_side.module_state import BufferWatch, OptionWatch

MOST_WAYS = 64
"""In which a model is called, as far as they are remembered."""


class NotVerified(UserError):
    """A call in a capture of a kind that could not be verified before: it has to run eagerly."""


class UnknownCall(NamedTuple):
    """A call of a layer, or of a unit, that was not verified: `dim` dimensions, one row for all if `shared`."""

    tap: Sampled
    dim: int
    shared: bool


class BegunPass(NamedTuple):
    """A forward pass of the root that begins. `failure`: what kept it from being verified just now."""

    call: RootCall
    way: object
    buffers: list[tuple[Tensor | None, int]]
    failure: Exception | None
    verified: bool = False
    mixed: frozenset[OutputPlace] = frozenset()  # outputs that must not be trained on


class _Reading(NamedTuple):
    """Facts about one way to call the model: `Verification.told`, `_shared`, `_output_dims`, `_mixed`, `_is_random`."""

    told: frozenset[ArgumentPlace]  # of the arguments that are the number of samples
    sizes: tuple[int, ...]  # the largest of which it was asked if they matter: see `_sizes_of`
    shared: frozenset[int]
    given: dict[int, Leaf]  # arguments that all samples were taken to share, by place
    output_dims: list[int | None] | None
    mixed: frozenset[OutputPlace]
    is_random: bool


class Verification:
    """Ways of calling the model that were verified, and what was found in them.

    begin_way   called before the root runs in a way that was not verified
    in_any_dim  whether an argument may have its samples in another dimension than the first
    """

    def __init__(
        self,
        engine: TestedEngine,
        state: StepState,
        *,
        begin_way: Callable[[], None],
        in_any_dim: bool,
        ranks: Ranks,
    ) -> None:
        self.followed: list[nn.Module] = []  # modules whose own parameters are followed (layers/bare.py)
        self.expanded: set[nn.Module] = set()  # layers that were given a row of parameters, expanded to all samples
        model = engine.model
        self.schedule = LookSchedule()
        self._parameters = list(model.parameters())
        self.buffers = BufferWatch(model, ())
        self.options = OptionWatch(model)
        self.held_by_graphs: set[nn.Parameter] = set()  # parameters of tapped layers that ran in compiled graphs
        self._engine, self._model, self._state, self._ranks = engine, model, state, ranks
        self._begin_way = begin_way
        self._in_any_dim = in_any_dim
        self._verified: dict[object, _Reading] = {}  # ways in which the root was called, in order
        self._searched: set[object] = set()  # ways in which no parameter is reached past its taps
        self._asked: object = None  # the way, and the pass, of which it was found that samples do not mix
        self._interrupted: SelfTest | None = None  # of that pass, until it runs with taps that fit
        self._warned_of_ways = False
        self._shared: frozenset[int] = frozenset()  # of the way: tensors with as many rows by chance
        self._mixed: frozenset[OutputPlace] = frozenset()  # of the way: outputs without rows that mix samples
        self.told: frozenset[ArgumentPlace] = frozenset()  # of the way: arguments that are the number of samples
        self.numbers = ToldNumbers()
        self.written: set[str] = set()  # parameters that forward writes
        self._is_random = False  # of the way: the model draws random numbers besides dropout's
        self.doubt = ""  # of the way: samples mix, unless an argument is shared by all of them
        self._output_dims: list[int | None] | None = None  # of the way: dimensions of samples in outputs, if known

    def locally(self) -> AbstractContextManager[None]:
        """Return a context in which forward passes do not communicate with other processes."""
        return self._ranks.apart()

    def forget(self) -> None:
        """Forget the results of verification, because the taps have changed."""
        self.expanded.clear()
        self._verified.clear()
        self._searched.clear()

    # -- a forward pass of the root ----------------------------------------------------------------------------------

    def begin(self, call: RootCall) -> BegunPass:
        """Verify the call, if it is the first of its way."""
        # train() or eval() of every module: what a forward does with its samples may hang on any of them
        # and so may modes of torch functions that are active
        modes = tuple(map(type, _get_current_function_mode_stack()))  # type: ignore[no-untyped-call]
        # whether anything is trained before a layer, for what requires a gradient may take another way, too
        training = tuple([module.training for module in self.options.modules])
        trained = tuple([parameter.requires_grad for parameter in self._parameters])
        shown = call.batch > 1  # one sample shows nothing of several
        arguments = call.args, call.kwargs
        given, told = signature(arguments, call.batch), self.numbers.look(arguments, call.batch)
        way = given, training, trained, modes, shown
        failure, verified = None, False
        if self._is_dry(call):
            if (run := dry_run.current()) is not None and run.verifies:
                failure, verified = self._verify(call, way, told), True
            return BegunPass(call, way, self.buffers.look(), failure, verified)
        if own_capture() is not None:
            if way not in self._verified or _is_larger(call, self._verified[way].sizes, 2):
                raise NotVerified("no call of this kind and size was verified, or its samples were all the same")
            return BegunPass(call, way, self.buffers.look(), None, mixed=self._verified[way].mixed)
        changed = self.options.has_changed() and not self.schedule.paused  # instruments register hooks
        known = self._verified.get(way)
        # a number was as large as the batch, by chance as it seemed, and has changed with it, or did not
        is_told = known is not None and shown and not told.surely <= known.told <= told.maybe
        if changed or is_told or known is None:
            if changed:
                self._meet_new_modules()
            self._begin_way()
            if call.batch:
                failure, verified = self._verify(call, way, told), True
                if self._mixing(call).has_different_samples():
                    self._remember(way, call)
        else:
            self.told = known.told
            _refuse_other_values(known.given, call)
            # it may mix many samples, and not few, or samples of many positions
            grown = _is_larger(call, known.sizes, 2) and not self.schedule.paused
            if self.schedule.is_due(call.batch) or grown:
                self._shared, self._output_dims, self._mixed = known.shared, known.output_dims, known.mixed
                self._is_random = known.is_random
                failure, verified = self._look_again(call, known.sizes), True
                self._verified[way] = self._reading(call, known.sizes)
        mixed = self._verified[way].mixed if way in self._verified else self._mixed
        return BegunPass(call, way, self.buffers.look(), failure, verified, mixed)

    def _meet_new_modules(self) -> None:
        """Watch modules that were put into the model since it was looked at; refuse those that train."""
        if list(self._model.modules()) == self.options.modules:
            return
        known = set(self._engine.trained().values())
        named = self._model.named_parameters()
        new = [name for name, parameter in named if parameter.requires_grad and parameter not in known]
        if new:
            raise UserError(f"{new[0]} was added after the engine was attached; detach the engine and attach a new one")
        self.options = OptionWatch(self._model)

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
            _refuse_unverified(begun.failure)
        self.settle(unknown, begun.call)
        if begun.mixed:
            self._forbid_training_on(begun.mixed, output, begun.call.batch)
        if self.followed and begun.way not in self._searched:
            self._search_past_taps(output)
            if len(self._searched) >= MOST_WAYS:
                self._searched.clear()
            self._searched.add(begun.way)

    def refuse_failed(self, begun: BegunPass, unknown: list[UnknownCall], misfit: str) -> None:
        """Refuse a pass that fails with taps if the untouched model can do it.

        It could not be verified, or layers were given one row, which was not that of all samples.
        """
        shared = _of_shared_rows(unknown, begun.call.batch)
        if begun.failure is None and shared is None:
            return
        mixing = self._mixing(begun.call)
        with mixing.untouched():
            try:
                mixing.run_on(None)
            except Exception:  # a mistake of the user's, or torch's own error
                return
        if shared is not None:
            raise shared
        if misfit:
            raise UserError(misfit) from begun.failure
        if begun.failure is not None:
            _refuse_unverified(begun.failure)

    def settle(self, unknown: list[UnknownCall], call: RootCall) -> None:
        """Verify a pass again that reached layers in ways that its verification did not reach."""
        if not unknown:
            return
        if dry_run.current() is not None:
            _note_known(unknown)
            return
        failure = None
        try:
            self._self_test(call, self._test_of(call, self._mixing(call)))
        except UserError:
            raise
        except Exception as error:
            failure = error
        for tap, dim, shared in unknown:
            if dim not in (tap.shared if shared else tap.known):
                if failure is None:
                    raise NotFollowed([tap.module], "it is given samples that are chosen by the data")
                raise UserError(
                    f"whether the rows of what {tap.name} was given are the samples is not known (the forward could "
                    f"not be run again to find out: {failure}): {KEEP_BATCH_FIRST}"
                )

    def _forbid_training_on(self, places: Collection[OutputPlace], output: Any, batch: int) -> None:
        """Refuse a backward pass through outputs, or losses in attributes, that mix samples."""
        tensors: dict[OutputPlace, Tensor] = dict(enumerate(tensors_in(output)))
        tensors |= losses_left_in(self._model, batch)
        for place in places:
            tensor = tensors.get(place)
            if tensor is None or not tensor.requires_grad:
                continue
            what = f"output {place}" if isinstance(place, int) else ".".join(filter(None, place[:2]))

            def refuse(gradient: Tensor, what: str = what) -> None:
                if own_capture() is not None or gradient.any():
                    raise UserError(
                        f"{what} of the model mixes samples, as a mean over the tokens of all samples does: it has no "
                        "gradient for each sample. Train on a loss that is a mean or sum over samples"
                    )

            tensor.register_hook(refuse)  # type: ignore[no-untyped-call]

    def _reading(self, call: RootCall, before: tuple[int, ...] = ()) -> _Reading:
        leaves = enumerate(leaves_in((call.args, call.kwargs)))
        given = {
            place: leaf.clone() if isinstance(leaf, Tensor) else leaf for place, leaf in leaves if place in self._shared
        }
        now = _sizes_of(call)
        sizes = tuple(map(max, now, before)) if len(now) == len(before) else now
        dims, mixed = self._output_dims, self._mixed
        return _Reading(self.told, sizes, self._shared, given, dims, mixed, self._is_random)

    def _remember(self, way: object, call: RootCall) -> None:
        """Record a way of calling the model. If one is forgotten, it is verified again."""
        self._verified[way] = self._reading(call)
        if len(self._verified) < MOST_WAYS:
            return
        del self._verified[next(iter(self._verified))]
        if not self._warned_of_ways:
            self._warned_of_ways = True
            warnings.warn(
                f"the model was called in {MOST_WAYS} ways, which differ in their numbers, options or modes, and each "
                "new one is verified, which is slow: give it numbers that change from step to step as tensors",
                stacklevel=2,
            )

    def _verify(self, call: RootCall, way: object, told: Told) -> Exception | None:
        """Verify the call; return the error that kept it from being run, if there was one.

        If the pass begins again with other taps, the untouched model is not asked again.
        """
        asked, (test, self._interrupted) = (way, self.schedule.passes), (self._interrupted, None)
        try:
            if asked != self._asked:
                self._shared, self._output_dims, self._mixed, self.doubt = frozenset(), None, frozenset(), ""
                self.told = frozenset()
                mixing, test = self._mixing(call), None
                if call.batch > 1:
                    self._draw(mixing, call, told)
                    self.told = mixing.told
                    self.numbers.found((call.args, call.kwargs), told, self.told)
                    self._shared, self._output_dims, self.doubt = mixing.shared, mixing.output_dims, mixing.doubt
                    self._is_random = mixing.is_random
                mixing.find_carried_state()
                self._judge_written(mixing)
                self._asked = asked
            else:
                mixing = self._mixing(call)
            if test is None or len(test.rows) != len(mixing.rows()):
                test = self._test_of(call, mixing)
            else:
                test.resume(call)
            self._self_test(call, test)
        except NotFollowed:
            self._interrupted = test
            raise
        except UserError:
            raise
        except Exception as error:
            if self.expanded:
                raise NotFollowed(list(self.expanded), "it is given a tensor that is made of parameters") from error
            return error
        return None

    def _draw(self, mixing: Mixing, call: RootCall, told: Told) -> None:
        """Refuse samples that mix. A tap may know why a module mixes them: then its refusal is the one to read."""
        try:
            mixing.draw(told)
        except UserError:
            with self._engine.forwards.trial(), self.locally():
                self._test_of(call, mixing).try_other_samples()
            raise

    def _look_again(self, call: RootCall, most: tuple[int, ...]) -> Exception | None:
        """Check some rows of a call whose way was verified before, for calls of at most these sizes."""
        try:
            whole = self.schedule.note_look()
            mixing = self._mixing(call)
            mixing.is_random = self._is_random
            if call.batch > 1:
                mixing.look_again(whole=whole)
                self._shared = mixing.shared
                if _is_larger(call, most):
                    mixing.compare_sizes()
            self._judge_written(mixing)
            if whole:
                mixing.find_carried_state()
                self._self_test(call, self._test_of(call, mixing, again=True))
        except UserError:
            raise
        except Exception as error:
            return error
        return None

    def _test_of(self, call: RootCall, mixing: Mixing, *, again: bool = False) -> SelfTest:
        """Return a test of samples for which `mixing` has found that they do not mix."""
        seed, dims = self.schedule.passes, self._output_dims
        return SelfTest(self._engine, call, mixing, seed=seed, again=again, output_dims=dims)

    def _self_test(self, call: RootCall, test: SelfTest) -> None:
        """Compare the taps with the untouched model."""
        with self._engine.forwards.trial() as unknown, self.locally():
            if self._engine.runs_by_sample():
                test.try_other_samples(more=1)  # which tells what samples share from what has a row for each
            compare = test.compare_rows if self._ranks.gathers_weights else test.run
            try:
                compare()
            except Mismatch as misfit:
                if self.followed:
                    test.try_other_samples()  # which tells operands that only have as many rows by chance
                if not misfit.modules:
                    raise _of_shared_rows(unknown, call.batch) or misfit from misfit
                raise
            except Unclipped as found:
                raise test.stray([self._engine.trained()[found.name]]) from found
            except UserError:
                raise
            except Exception as error:
                if not self.expanded and (refusal := _of_shared_rows(unknown, call.batch)) is not None:
                    raise refusal from error
                # vmap may have gone through forward, and not through backward.
                if not isinstance(error, RuntimeError) or not self._engine.run_by_loop():
                    raise
                compare()
            if shared := dict.fromkeys(call.tap.module for call in unknown if call.shared):
                test.refuse_chosen(shared)
        self._mixed = frozenset(test.mixed)
        _note_known(unknown)

    def _mixing(self, call: RootCall) -> Mixing:
        gates = [] if self._ranks.gathers_weights else self._engine.trained().values()
        found = Mixing(call, self._model, self._alone, gates=gates, in_any_dim=self._in_any_dim, shared=self._shared)
        found.told = self.told
        found.may_repeat = bool(self.followed)  # operators are told apart by their numbers of rows
        return found

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Run the model without taps, graphs and other processes. It may take gradients of its own."""
        with self._engine.without_taps(), self.locally(), OWN_GRADIENTS.taken(), eagerly():
            yield

    def _judge_buffers(self, paths: list[str], call: RootCall) -> None:
        """Refuse buffers that forward changes differently when a sample is replaced."""
        seen = self._mixing(call).watch_with_others(lambda: self.buffers.values(paths)) if call.batch else []
        for index, path in enumerate(paths):
            self.buffers.judge(path, [values[index] for values in seen])

    def _judge_written(self, mixing: Mixing) -> None:
        """Refuse parameters, and buffers written through `.data`, that forward makes of the samples."""
        if mixing.snapshot is None or not mixing.snapshot.written.names():
            return
        written, parameters = mixing.snapshot.written, {name for name, _ in self._model.named_parameters()}
        names = [name for name in written.names() if name in parameters or self.buffers.watches(name)]
        self.written.update(parameters.intersection(names))
        if set(names) <= self.buffers.independent:
            return
        seen = mixing.watch_with_others(lambda: written.values(names))
        for name, *values in zip(names, *seen, strict=True):
            self.buffers.judge(name, values)

    def _search_past_taps(self, output: Any) -> None:
        """Find parameters that autograd reaches from the output as in ordinary training, past all taps."""
        reached = {tensor for tensor in leaves_behind(tensors_in(output)) if isinstance(tensor, nn.Parameter)}
        # A compiled graph has them as inputs, whatever it does with them: an ordinary gradient of one will be refused.
        reached -= self.held_by_graphs
        if not reached:
            return
        if modules := [module for module in self.followed if any(p in reached for p in module.parameters())]:
            raise NotFollowed(modules, "a parameter is used where that cannot be followed")
        raise NotFollowed((), "a parameter is used outside of the module that owns it", strays=reached)


def _refuse_unverified(failure: Exception) -> NoReturn:
    raise UserError(
        f"the model's forward ran, but could not be run again to verify it ({failure}): its samples may mix. A forward "
        "must give the same when it is called again with the same arguments, and take a part of their rows"
    ) from failure


def _sizes_of(call: RootCall) -> tuple[int, ...]:
    """Return the number of samples, and the sizes of each tensor of the call with the number of its elements."""
    leaves = leaves_in((call.args, call.kwargs))
    tensors = [leaf if isinstance(leaf, Tensor) else leaf.data for leaf in leaves]
    return call.batch, *(size for tensor in tensors for size in (*tensor.shape, tensor.numel()))


def _is_larger(call: RootCall, most: tuple[int, ...], factor: int = 1) -> bool:
    """Return whether anything in the call is more than `factor` times as large as in calls of these sizes."""
    return any(size > factor * before for size, before in zip(_sizes_of(call), most, strict=False))


def _refuse_other_values(given: dict[int, Leaf], call: RootCall) -> None:
    """Refuse an argument that was taken to be shared by all samples, if it changes and still has a row for each."""
    if not given:
        return
    for place, leaf in enumerate(leaves_in((call.args, call.kwargs))):
        before = given.get(place)
        if not isinstance(before, Tensor) or not isinstance(leaf, Tensor) or len(leaf) != call.batch:
            continue
        if before.shape != leaf.shape or not torch.equal(before, leaf):
            raise UserError(
                f"tensor {place} of the model's arguments has as many rows as there are samples, and changes from step "
                "to step: if they are the samples', the model mixes them; if all samples share it, give it a leading "
                "dimension of 1 (table.unsqueeze(0))"
            )


def _note_known(calls: list[UnknownCall]) -> None:
    """Note that rows of these calls are the samples, or one row for all of them."""
    for tap, dim, shared in calls:
        (tap.shared if shared else tap.known).add(dim)


def _of_shared_rows(unknown: list[UnknownCall], batch: int) -> NotFollowed | None:
    """Return the refusal of layers that were given one row for all samples, if there are any."""
    taps = [call.tap for call in unknown if call.shared]
    if not taps:
        return None
    return NotFollowed(
        list(dict.fromkeys(tap.module for tap in taps)),
        f"{taps[0].name} was given a tensor with one row for all {batch} samples, and its output is not simply "
        "broadcast over them. Give it a row for each sample (x.expand(batch_size, ...))",
    )
