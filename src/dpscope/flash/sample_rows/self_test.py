"""The self-test: on rows of the user's own batch, the tapped model does what the untouched model does.

The model runs twice from the same random state, once with all taps taken off and once as it is trained. For random
cotangents u of the output, and random weights w_b of the samples:

    outputs   the tapped model's are the untouched model's
    sums      Σ_b w_b v_b, which the engine makes of what its backward pass left for the cotangent u, is the gradient
              that ordinary autograd gives for the cotangent with row b multiplied by w_b; for every trained parameter

Rows of the output belong to samples (mixing.py), so that both sides are the same function of w. They agree for random w
only where every v_b is right: a layer whose rows are not the samples, that is not what its class says, whose options
change, whose hooks do more than they seem to, is found whatever the reason. A difference names the parameter; its
module is tapped in another way (layers/plan.py), and the test is made again.

Half of the samples are silent: their rows of u are zero, so their v_b are zero in any precision. Their weights are
large on the side of the engine alone. Then the other half is silent, and what the engine has for it has to be zero.
This also finds parameters with tiny gradients whose rows are not the samples, which rounding would hide in a sum.

Where outputs have no row for each sample, or samples that run one by one draw other random numbers, one sample is
replaced by another instead: the norms of the other samples' gradients have to stay what they were, for every parameter,
and the sum of all v_b has to be autograd's gradient. The weights of a sharded model are elsewhere: its norms are
compared with weights that are made up, and its sums are not.

Outputs without rows, such as a loss, are asked the same way: do the norms of other samples' gradients stay what they
were, and is a sample's gradient the same alone, or as many times larger as there are samples? Those that mix samples
may be returned, but not trained on.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash.gradients.clip_rules import ClipRule
from dpscope.flash.gradients.paths import PathRules
from dpscope.flash.gradients.slots import OWN_GRADIENTS
from dpscope.flash.oracle import gradients_of
from dpscope.flash.sample_rows.proxy import Mismatch, NotFollowed
from dpscope.flash.sample_rows.snapshots import opened_gates, untouched
from dpscope.flash.sample_rows.tried_call import PUT_BATCH_FIRST, RootCall, is_coarse, slices
from dpscope.flash.step.microbatch import MicroBatch
from dpscope.flash.step.step_state import Recorded, StepState
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.arguments import Leaf, replace_leaves, take, tensors_in
from dpscope.flash.torch_side.autocast import no_autocast
from dpscope.flash.torch_side.autograd_graph import leaves_behind, nodes_behind
from dpscope.flash.torch_side.dry_run import read
from dpscope.flash.torch_side.frames import eagerly
from dpscope.flash.torch_side.left_graphs import LeftGraphs
from dpscope.flash.torch_side.module_state import attributes_of, tensors_inside, uncached_parametrizations
from dpscope.random_states import RandomStates, cuda_devices, seed_all

# How far two ways to compute the same may be apart: of the tensor itself, and (gradients that nearly cancel) of all.
_OUTPUTS = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF_OUTPUTS = 0.05
_SUMS = {torch.float64: (1e-6, 1e-9), torch.float32: (1e-2, 1e-4)}
_HALF_SUMS = (0.15, 0.02)
# How far norms over all parameters may be apart, of the largest: in runs of one shape, and with fewer samples.
_TOTALS = {torch.float64: (1e-6, 1e-6), torch.float32: (1e-3, 2e-2)}
_HALF_TOTALS = (0.05, 0.15)
_MOVED = (
    "one sample's gradient of {name} changes with another sample (by {off} of its size): samples mix in the model. "
    f"{PUT_BATCH_FIRST}"
)
_DIFFERENT = (
    "the gradient of {name} that flash clipping makes is not ordinary autograd's (off by {off} of its size). If a hook "
    "or an autograd.Function mixes samples in backward, remove it"
)
SILENT_WEIGHT = 1e4
"""Of samples without a cotangent, in the engine's sums."""
_LOUD = 2.0**10
"""Factor of all weights, unless a model computes in 16 bits: a backward pass that clips what is large is not linear."""


# Of a tensor among the outputs; or module, attribute, and place in it, where forward has left the tensor.
OutputPlace = int | tuple[str, str, int]
Norms = dict[nn.Parameter, tuple[Tensor, Tensor]]  # of a sum's error, and of the gradient that it should be


class Trials(Protocol):
    samples_tried: int

    def trial(self) -> AbstractContextManager[list[Any]]: ...


class TestedEngine(Protocol):
    """Engine as the test sees it."""

    model: nn.Module
    state: StepState
    path_rules: PathRules

    @property
    def forwards(self) -> Trials: ...

    def without_taps(self) -> AbstractContextManager[None]: ...

    def runs_by_sample(self) -> bool: ...

    def run_by_loop(self) -> bool: ...

    def trained(self) -> dict[str, nn.Parameter]: ...


class SelfTest:
    """One test of a call, of the samples `rows`.

    sampled      arguments with a row for each: id -> dimension
    output_dims  of each tensor among the outputs: the dimension of samples; None if that is not known
    """

    def __init__(
        self,
        engine: TestedEngine,
        call: RootCall,
        sampled: dict[int, int],
        rows: list[int],
        *,
        seed: int,
        output_dims: Sequence[int | None] | None = None,
    ) -> None:
        self.output_dims = output_dims
        self.engine, self.model, self.call, self.sampled = engine, engine.model, call, sampled
        self.seed = seed
        self.rows = torch.tensor(rows)
        order = torch.randperm(len(rows), generator=_seeded("cpu", seed))
        spread = torch.linspace(0.5, 1.5, len(rows), dtype=torch.float64)
        self.weights = torch.where(order % 2 == 0, spread[order], -spread[order])  # no two are alike
        self.first_half = order < -(-len(rows) // 2)
        self.loudness = 1.0  # factor of the weights
        self.coarse = False  # whether products are rounded to less than the parameters' dtype
        self.has_rows = False  # whether an output has a row for each sample
        self.places: list[OutputPlace] = []  # of outputs without rows
        self.mixed: set[OutputPlace] = set()  # those of them that mix samples
        self.draws = False  # whether the model draws random numbers

    def run(self) -> None:
        """Raise NotFollowed for a module whose taps do not do what it does."""
        names = self.engine.trained()
        if not names:
            return
        with opened_gates(names.values()):
            if not self._compare(names):
                self.compare_rows()
            self._find_mixed()

    # -- one sample replaced -------------------------------------------------------------------------------------------

    def compare_rows(self) -> None:
        """Raise NotFollowed for a module whose per-sample gradients change with another sample."""
        if len(self.rows) < 2 or dry_run.current() is not None:
            return
        before, order = self._row_norms(self.rows)
        for place in (0, len(self.rows) - 1):
            after, _ = self._row_norms(self._with_other(place))
            bad = self._moved(before, after, place)
            if bad:
                named = {parameter: name for name, parameter in self.engine.trained().items()}
                self._raise_for(bad, order, named, _MOVED)

    def try_other_samples(self, more: int = 0) -> None:
        """Run the tapped model forward on other samples, and `more` of them, for taps that look at what changes."""
        if self.call.batch < 2 or dry_run.current() is not None:
            return
        rows = (torch.cat([self.rows, self.rows[:more]]) + 1) % self.call.batch
        with untouched(self.model), self.engine.state.trial(len(rows)):
            try:
                self._forward(self.call.forward, rows)
            except UserError:
                raise
            except (Exception, NotFollowed):
                return

    def _with_other(self, place: int) -> Tensor:
        """Return the rows, the one at `place` replaced by another sample."""
        rows = self.rows.clone()
        others = [row for row in range(self.call.batch) if row not in rows.tolist()]
        rows[place] = others[place % len(others)] if others else (rows[place] + 1) % self.call.batch
        return rows

    def _find_mixed(self) -> None:
        """Find outputs without rows, such as a loss, whose gradient is no sum over samples."""
        if len(self.rows) < 2 or not self.sampled or dry_run.current() is not None:
            return
        self.mixed = {place for place in self.places if self._mixes(place)}

    def _mixes(self, place: OutputPlace) -> bool:
        """Return whether a sample's gradient of this output depends on the others, or on their number."""
        together = self._norms_of(place, self.rows)
        if together is None:
            return False
        dtypes = {parameter.dtype for parameter in self.engine.trained().values()}
        exact = _TOTALS.get(dtypes.pop(), _HALF_TOTALS) if len(dtypes) == 1 and not self.coarse else _HALF_TOTALS
        same, other_size = (each * float(together.max()) for each in exact)
        for replaced in (0, len(self.rows) // 2, len(self.rows) - 1):
            other = self._norms_of(place, self._with_other(replaced))
            kept = torch.arange(len(self.rows)) != replaced
            if other is not None and bool(((together - other).abs()[kept] > same).any()):
                return True
        for row in () if self.draws else (0, len(self.rows) - 1):
            alone = self._norms_of(place, self.rows[row : row + 1])
            # The gradient of a sum is the same alone; that of a mean is as many times larger as there are samples.
            apart = [] if alone is None else [abs(float(alone / n - together[row])) for n in (1, len(self.rows))]
            if apart and min(apart) > other_size:
                return True
        return False

    def _norms_of(self, place: OutputPlace, rows: Tensor) -> Tensor | None:
        """Return the norms of the samples' gradients of one output, (B,), over all parameters; None if it fails."""
        with untouched(self.model), self.engine.state.trial(len(rows)):
            try:
                output = self._run(self.call.forward, rows)[place]
                gradients_of(_reduced(output), [])
            except (UserError, torch.OutOfMemoryError):
                raise
            except Exception:  # a model that takes no single sample, say
                return None
            with self._closed(self.engine.state.take_recorded()) as micro:
                return None if micro is None else micro.squared[0].sqrt().cpu()

    @contextmanager
    def _closed(self, recorded: Recorded) -> Iterator[MicroBatch | None]:
        """Close what a backward pass has recorded. None if that is nothing."""
        recorded = [(slot, parts) for slot, parts in recorded if parts]
        if not recorded:
            yield None
            return
        with torch.no_grad(), no_autocast(recorded[0][0].parameter.device.type):
            yield MicroBatch(recorded, rules=self.engine.path_rules, clip=ClipRule(), mean=False, loss_scale=1.0)
        self.engine.path_rules.close()

    def _row_norms(self, rows: Tensor) -> tuple[dict[nn.Parameter, Tensor], list[nn.Parameter]]:
        """Return squared norms of the samples' gradients, (B,), by parameter, and parameters in backward's order."""
        with untouched(self.model), self.engine.state.trial(len(rows)):
            outputs = self._forward(self.call.forward, rows)
            if not outputs:
                return {}, []
            self.coarse = _rounds_inside(outputs)
            terms = list(map(_reduced, outputs))
            total = sum(terms[1:], terms[0])
            gradients_of(total, [])
            recorded = self.engine.state.take_recorded()
            norms: dict[nn.Parameter, Tensor] = {}
            for each in recorded:
                with self._closed([each]) as one:
                    norms |= {} if one is None else {each[0].parameter: one.squared[0]}
            return norms, [slot.parameter for slot, _ in recorded]

    def _moved(
        self, before: dict[nn.Parameter, Tensor], after: dict[nn.Parameter, Tensor], place: int
    ) -> dict[nn.Parameter, float]:
        """Return the parameters of which norms changed for samples that were not replaced, by more than rounding."""
        bad = {}
        kept = torch.tensor([row for row in range(len(self.rows)) if row != place])
        whole = math.sqrt(sum(float(norms.max()) for norms in before.values() if bool(norms.isfinite().all())))
        for parameter, norms in before.items():
            if parameter not in after:
                continue
            was, now = (each[kept.to(each.device)].sqrt() for each in (norms, after[parameter]))
            share, floor = self._tolerance(parameter)
            off, size = float((was - now).abs().max()), float(norms.max().sqrt())
            if math.isfinite(off) and off > share * size + floor * whole:
                bad[parameter] = off / max(size, 1e-30)
        return bad

    # -- sums ----------------------------------------------------------------------------------------------------------

    def _compare(self, names: dict[str, nn.Parameter]) -> bool:
        versions = [parameter._version for parameter in names.values()]
        with untouched(self.model), self.engine.without_taps():
            outputs, expected, left = self._ordinary(list(names.values()))
            if [parameter._version for parameter in names.values()] != versions:  # a forward that writes into them
                outputs, expected, left = self._ordinary(list(names.values()))
        self._refuse_left(left)
        if expected is None:
            return False
        gradients = dict(zip(names.values(), expected, strict=True))
        del expected
        with untouched(self.model), self.engine.state.trial(len(self.rows)):
            wrong, norms, order, leaking = self._tapped(outputs, gradients)
        if wrong and self._is_random():
            return False  # what draws random numbers sample by sample draws others than for a batch
        named = {parameter: name for name, parameter in names.items()}
        bad = self._bad_sums(norms) or leaking
        if bad:
            self._raise_for(bad, order, named, _DIFFERENT)
        if wrong:
            raise Mismatch([self.model], f"with taps the model gives another output than without ({wrong})")
        return self.has_rows

    def _refuse_left(self, left: LeftGraphs) -> None:
        """Refuse a loss that forward keeps where nobody can look: in a list of its file, say.

        What stays the same for other samples (a weight that is derived of others) is no loss.
        """
        kept = [tensor for tensor in left.tensors() if len(self.rows) not in tensor.shape]
        if not kept:
            return
        with untouched(self.model), self.engine.without_taps(), (again := LeftGraphs()):
            again.mark(self._forward(self.model.forward, (self.rows + 1) % self.call.batch))
        others = again.tensors()
        for tensor in kept:
            if not any(tensor.shape == other.shape and torch.equal(tensor, other) for other in others):
                raise UserError(
                    f"forward keeps a tensor of shape {tuple(tensor.shape)} with its history outside of the model's "
                    "modules, and it has no row for each sample: a loss made of it may mix samples. Return it from "
                    "forward, keep it in an attribute of a module, or detach it"
                )

    # -- the two runs --------------------------------------------------------------------------------------------------

    def _arguments(self, rows: Tensor) -> tuple[Any, Any]:
        def chosen(leaf: Leaf) -> Leaf:
            if id(leaf) in self.sampled:
                leaf = take(leaf, rows, self.sampled[id(leaf)])
            if not isinstance(leaf, Tensor):
                return leaf
            fresh = leaf.detach().clone()
            return fresh.requires_grad_() if leaf.requires_grad else fresh

        found: tuple[Any, Any] = replace_leaves((self.call.args, self.call.kwargs), chosen)
        return found

    def _run(self, forward: Callable[..., Any], rows: Tensor | None = None) -> dict[OutputPlace, Tensor]:
        """Run the model on these rows, or on others; return the outputs, and losses in attributes, with a gradient."""
        args, kwargs = self._arguments(self.rows if rows is None else rows)
        self.engine.forwards.samples_tried += rows is not None
        with torch.enable_grad(), warnings.catch_warnings(), eagerly(), uncached_parametrizations():
            warnings.simplefilter("ignore")
            output = forward(*args, **kwargs)
        found: dict[OutputPlace, Tensor] = dict(enumerate(tensors_in(output)))
        found.update(losses_left_in(self.model, len(self.rows)))
        return {place: leaf for place, leaf in found.items() if leaf.requires_grad and leaf.is_floating_point()}

    def _forward(self, forward: Callable[..., Any], rows: Tensor | None = None) -> list[Tensor]:
        """Return the outputs that have a gradient; note their dimensions of samples, and places without one."""
        found = self._run(forward, rows)
        dims = {place: self._dim_of(place, leaf) if isinstance(place, int) else None for place, leaf in found.items()}
        self.dims = [dim for place, dim in dims.items() if isinstance(place, int)]
        self.places = [place for place, dim in dims.items() if dim is None]
        return [leaf for place, leaf in found.items() if isinstance(place, int)]

    def _ordinary(self, parameters: list[nn.Parameter]) -> tuple[list[Tensor], list[Tensor | None] | None, LeftGraphs]:
        """Return outputs, the gradients for cotangents whose rows are multiplied by the weights, and what is left."""
        before, left = RandomStates.now(cuda_devices(self.model)), LeftGraphs()
        with left if dry_run.current() is None else nullcontext():
            outputs = self._forward(self.model.forward)
        self.draws = not before.equals(RandomStates.now(cuda_devices(self.model)))
        left.mark(outputs)
        if not outputs:
            return [], None, left
        self.has_rows = any(dim is not None for dim in self.dims)
        self.coarse = _rounds_inside(outputs)
        full = {tensor.dtype for tensor in (*outputs, *parameters)} <= set(_SUMS) and not self.coarse
        self.loudness = _LOUD if full and dry_run.current() is None else 1.0
        total = self._total(outputs, self.first_half, weighted=True)
        with OWN_GRADIENTS.taken(), no_autocast(total.device.type):
            found = _gradients(total, parameters)
        return [output.detach() for output in outputs], list(found), left

    def _tapped(
        self, expected: list[Tensor], gradients: dict[nn.Parameter, Tensor | None]
    ) -> tuple[str, Norms, list[nn.Parameter], dict[nn.Parameter, float]]:
        """Return four results of the tapped model.

        They are how outputs differ, how far the engine's weighted sums are from autograd's gradients, parameters in
        the order of the backward pass, and parameters that have something for a silent sample. `expected` is emptied
        first, because outputs may be the largest tensors of a step, and `gradients` one by one: beside them no more
        than a few sums are held, so that the test takes no more memory than an ordinary step.
        """
        outputs = self._forward(self.call.forward)
        if len(outputs) != len(expected):
            raise Mismatch(
                [],
                f"the model gives {len(expected)} tensors, and {len(outputs)} when it is run again: it depends on "
                "something outside of it. Ask it for its last output alone (output_hidden_states=False)",
            )
        if [output.shape for output in outputs] != [each.shape for each in expected]:
            raise Mismatch([], "with taps the model gives outputs of other shapes than without")
        wrong = self._differing(expected, outputs)
        expected.clear()
        past = {leaf for leaf in leaves_behind(outputs) if isinstance(leaf, nn.Parameter)}
        if past:
            raise self.stray(past)
        gradients_of(self._total(outputs, self.first_half, weighted=False), [])
        outputs.clear()
        recorded = self.engine.state.take_recorded()
        order = [slot.parameter for slot, _ in recorded]
        weights = self.loudness * self.weights.masked_fill(~self.first_half, SILENT_WEIGHT)
        norms: Norms = {}

        def compare(parameter: nn.Parameter, mine: Tensor | None) -> None:
            truth = gradients.pop(parameter)
            nothing = parameter.new_zeros(())
            truth = nothing if truth is None else truth
            norms[parameter] = _norm((nothing if mine is None else mine) - truth), _norm(truth)

        with self._closed(recorded) as micro:
            del recorded
            if micro is not None:
                self._sum(micro, weights if self.has_rows else torch.ones_like(weights), compare)
                del micro
        for parameter in list(gradients):
            compare(parameter, None)
        if not self.has_rows or len(self.rows) < 2:
            return wrong, norms, order, {}
        others: dict[nn.Parameter, Tensor] = {}
        with self.engine.state.trial(len(self.rows)):
            gradients_of(self._total(self._forward(self.call.forward), ~self.first_half, weighted=False), [])
            with self._closed(self.engine.state.take_recorded()) as micro:
                if micro is not None and self._is_loud(micro, self.first_half):
                    silent = self.first_half.to(weights.dtype)
                    self._sum(micro, silent, lambda parameter, total: others.update({parameter: _norm(total)}))
        return wrong, norms, order, _not_zero(others)

    @staticmethod
    def _is_loud(micro: MicroBatch, samples: Tensor) -> bool:
        """Return whether any of these samples has a gradient."""
        squared = micro.squared[0]
        return bool(read(squared.where(samples.to(squared.device), 0.0).any(), False))

    @staticmethod
    def _sum(micro: MicroBatch, weights: Tensor, take: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Give the engine's weighted sums of trained parameters to `take`, a few at a time."""
        scale = micro.clipping.scale
        micro.clipping = replace(micro.clipping, scale=weights.to(scale.device, scale.dtype).unsqueeze(0))
        for batch in micro.sums(into=None, factored=False):
            for parameter, total in zip(batch.parameters, batch.tensors, strict=True):
                take(parameter, total)
            del batch, total

    def stray(self, parameters: Collection[nn.Parameter]) -> NotFollowed:
        """Return the refusal of parameters that are used outside of the modules that own them."""
        names = [name for name, parameter in self.engine.trained().items() if parameter in set(parameters)]
        owners = [self.model.get_submodule(name.rpartition(".")[0]) for name in names]
        return NotFollowed(owners, "a parameter is used outside of the module that owns it", strays=parameters)

    # -- cotangents ----------------------------------------------------------------------------------------------------

    def _dim_of(self, place: int, output: Tensor) -> int | None:
        """Return the dimension of samples; if it is not known, the first one of that size."""
        if self.output_dims is not None and place < len(self.output_dims):
            return self.output_dims[place]
        return next((dim for dim, size in enumerate(output.shape) if size == len(self.rows)), None)

    def _total(self, outputs: list[Tensor], live: Tensor, *, weighted: bool) -> Tensor:
        """Return Σ output · u over the samples that are `live`, multiplied by their weights if `weighted`.

        u is random for outputs with a row for each sample; for others only if there is none of those. It is drawn
        again for each run, and not kept.
        """
        terms = []
        for place, (output, dim) in enumerate(zip(outputs, self.dims, strict=True)):
            if dim is None and self.has_rows:
                terms.append(0 * output.sum())
                continue
            random = _seeded(output.device, self.seed + 1 + place)
            u = torch.randn(output.shape, generator=random, device=output.device).to(output.dtype)
            if dim is not None:
                rows = self.loudness * self.weights * live if weighted else live
                u *= rows.to(u.device, u.dtype).view([-1 if axis == dim else 1 for axis in range(output.dim())])
            terms.append((output * u).sum())
        return sum(terms[1:], terms[0])

    # -- comparing -----------------------------------------------------------------------------------------------------

    def _differing(self, outputs: list[Tensor], found: list[Tensor]) -> str:
        for mine, other in zip(found, outputs, strict=True):
            tolerance = _OUTPUTS.get(other.dtype, _HALF_OUTPUTS)
            if self.coarse or is_coarse(other):
                tolerance = max(tolerance, _HALF_OUTPUTS)
            apart, size = _largest_difference(mine.detach(), other)
            if apart > tolerance * size + 1e-30:
                return f"{apart / max(size, 1e-30):.1e} of its size"
        return ""

    def _is_random(self) -> bool:
        """Return whether samples run one by one and the model draws random numbers."""
        if not self.engine.runs_by_sample():
            return False
        runs = []
        for seed in (1, 2):
            with untouched(self.model), self.engine.without_taps(), torch.no_grad():
                seed_all(seed, cuda_devices(self.model))
                args, kwargs = self._arguments(self.rows)
                runs.append(tensors_in(self.model.forward(*args, **kwargs)))
        return any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*runs, strict=True))

    def _bad_sums(self, norms: Norms) -> dict[nn.Parameter, float]:
        """Return the parameters whose sums differ, with the relative error."""
        error, size = (read(torch.stack(each), 0.0) for each in zip(*norms.values(), strict=True))  # one wait each
        whole = math.hypot(*(each for each in size if math.isfinite(each)))
        bad = {}
        for parameter, off, own in zip(norms, error, size, strict=True):
            share, floor = self._tolerance(parameter)
            if math.isfinite(own) and not off <= share * own + floor * whole:  # what is no number has no size
                bad[parameter] = off / max(own, 1e-30)
        return bad

    def _tolerance(self, parameter: nn.Parameter) -> tuple[float, float]:
        """Return how far two ways to compute a gradient may be apart: of its size, and of that of all parameters."""
        return _HALF_SUMS if self.coarse or is_coarse(parameter) else _SUMS.get(parameter.dtype, _HALF_SUMS)

    def _raise_for(
        self, bad: dict[nn.Parameter, float], order: list[nn.Parameter], names: dict[nn.Parameter, str], what: str
    ) -> NoReturn:
        """Name the parameter that backward reaches first: its error may propagate to all layers before it.

        With its module goes the same module of other blocks, if its gradient is wrong, too.
        """
        missed = [parameter for parameter in bad if parameter not in set(order)]
        first = missed[0] if missed else next(parameter for parameter in order if parameter in bad)
        name = names[first]
        alike = [names[each] for each in (first, *bad) if _in_any_block(names[each]) == _in_any_block(name)]
        owners = dict.fromkeys(self.model.get_submodule(each.rpartition(".")[0]) for each in alike)
        raise Mismatch(list(owners), what.format(name=name, off=f"{bad[first]:.1e}"))


def losses_left_in(model: nn.Module, batch: int) -> Iterator[tuple[OutputPlace, Tensor]]:
    """Yield tensors that a forward has left in attributes, and that may be made of all samples: an auxiliary loss.

    Those with several dimensions have rows if one of them has the batch's size. Those that are made of parameters
    alone (a weight that a hook derives) are left out.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        for key, value in attributes_of(module).items():
            for number, tensor in enumerate(tensors_inside(value, seen)):
                if tensor.grad_fn is None or (tensor.dim() > 1 and batch in tensor.shape):
                    continue
                if not any(isinstance(leaf, nn.Parameter) for leaf in leaves_behind([tensor])):
                    yield (name, key, number), tensor


def _reduced(output: Tensor) -> Tensor:
    """Return a sum whose gradient depends on the output's own elements, because their order may change with samples."""
    return output.sum() if output.numel() == 1 else (3 * output).sin().sum()


def _in_any_block(name: str) -> str:
    """Return the name of a parameter without the numbers of blocks and experts."""
    return re.sub(r"\d+", "#", name)


def _gradients(total: Tensor, parameters: list[nn.Parameter]) -> Sequence[Tensor | None]:
    """Return autograd's gradients; by `backward` if there is a reentrant checkpoint, which `grad` does not enter."""
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes_behind([total])):
        return gradients_of(total, parameters)
    return torch.autograd.grad(total, parameters, allow_unused=True)


def _rounds_inside(outputs: list[Tensor]) -> bool:
    """Return whether the model computed in 16 bits, whatever it returns: an autocast of its own, as Accelerate's is."""
    half, casts = (torch.bfloat16, torch.float16), ("device_autocast_kwargs", "cpu_autocast_kwargs")
    return any(
        any(part.dtype in half for part in getattr(node, "_input_metadata", ()))
        or any(getattr(node, cast, {}).get("enabled") for cast in casts)  # of a reentrant checkpoint
        for node in nodes_behind(outputs)
    )


def _not_zero(norms: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, float]:
    sizes = read(torch.stack(list(norms.values())), 0.0) if norms else []
    return {parameter: size for parameter, size in zip(norms, sizes, strict=True) if size and math.isfinite(size)}


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm


def _seeded(device: torch.device | str, seed: int) -> torch.Generator | None:
    is_there = dry_run.current() is None or torch.device(device).type == "cpu"
    return torch.Generator(device).manual_seed(seed) if is_there else None


def _largest_difference(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return max|found − wanted| and max|wanted| in float64, a slice at a time, because copies of logits are large."""
    apart = size = 0.0
    whole = torch.arange(1)
    for mine, other in zip(slices(found[None], 0, whole), slices(wanted[None], 0, whole), strict=True):
        if other.numel():
            apart = max(apart, read((mine.double() - other.double()).abs().nan_to_num(0).amax(), 0.0))
            size = max(size, read(other.double().abs().nan_to_num(0, 0, 0).amax(), 0.0))
    return apart, size
