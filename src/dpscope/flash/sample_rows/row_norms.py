"""Per-sample gradients of the tapped model with one sample replaced, by their norms: those of the others must stay.

Where outputs have no row for each sample, or samples that run one by one draw other random numbers, weighted sums prove
nothing (self_test.py). Then one sample is replaced by another: the norms of the other samples' gradients have to stay
what they were, for every parameter. The weights of a sharded model are elsewhere: its norms are compared with weights
that are made up.

Outputs without rows, such as a loss, are asked the same way: do the norms of other samples' gradients stay what they
were, and is a sample's gradient the same alone, or as many times larger as there are samples? Those that mix samples
may be returned, but not trained on.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash.gradients.clip_rules import ClipRule
from dpscope.flash.gradients.paths import PathRules
from dpscope.flash.oracle import gradients_of
from dpscope.flash.sample_rows.comparison import is_coarse
from dpscope.flash.sample_rows.proxy import Mismatch, NotFollowed, Unclipped
from dpscope.flash.sample_rows.tried_call import PUT_BATCH_FIRST, RootCall, TriedCall, given_like
from dpscope.flash.step.microbatch import MicroBatch
from dpscope.flash.step.step_state import Recorded, StepState
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.arguments import Leaf, replace_leaves, take, tensors_in
from dpscope.flash.torch_side.autocast import no_autocast
from dpscope.flash.torch_side.autograd_graph import leaves_behind, nodes_behind
from dpscope.flash.torch_side.frames import eagerly
from dpscope.flash.torch_side.module_state import attributes_of, tensors_inside, uncached_parametrizations

# How far two ways to compute a gradient may be apart: of the gradient itself, and (those that nearly cancel) of all.
_SUMS = {torch.float64: (1e-6, 1e-9), torch.float32: (1e-2, 1e-4)}
_HALF_SUMS = (0.15, 0.02)
# How far norms over all parameters may be apart, of the largest: in runs of one shape, and with fewer samples.
_TOTALS = {torch.float64: (1e-6, 1e-6), torch.float32: (1e-3, 2e-2)}
_HALF_TOTALS = (0.05, 0.15)
_MOVED = (
    "one sample's gradient of {name} changes with another sample (by {off} of its size): samples mix in the model. "
    f"{PUT_BATCH_FIRST}"
)

# Of a tensor among the outputs; or module, attribute, and place in it, where forward has left the tensor.
OutputPlace = int | tuple[str, str, int]


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


class RowNorms:
    """Runs of the tapped model on some samples of a call, and the norms that they leave.

    tried        says which arguments hold samples, and which samples to run on
    output_dims  of each tensor among the outputs: the dimension of samples; None if that is not known
    """

    def __init__(
        self,
        engine: TestedEngine,
        call: RootCall,
        tried: TriedCall,
        *,
        output_dims: Sequence[int | None] | None = None,
    ) -> None:
        self.engine, self.model, self.call, self.output_dims = engine, engine.model, call, output_dims
        self.tried, self.sampled, self.rows = tried, tried.sampled_leaves(), torch.tensor(tried.rows())
        self.untouched, self.alone, self.devices = tried.untouched, tried.alone, tried.devices
        self.watched, self.numbers, self.opened_gates = tried.watched, tried.numbers, tried.opened_gates
        self.coarse = False  # whether products are rounded to less than the parameters' dtype
        self.draws = False  # whether the model draws random numbers
        self.places: list[OutputPlace] = []  # of outputs without rows
        self.mixed: set[OutputPlace] = set()  # those of them that mix samples
        self.spread: set[nn.Parameter] = set()  # parameters that several samples were seen to have a gradient of

    def resume(self, call: RootCall) -> None:
        """Go on with the same samples after the taps have changed."""
        self.call = self.call._replace(forward=call.forward)

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

    def refuse_chosen(self, modules: Iterable[nn.Module]) -> None:
        """Raise NotFollowed for modules whose one row is not for all samples, but of one that is chosen by the data.

        Then one sample alone has a gradient of their parameters.
        """
        own = {module: set(module.parameters(recurse=False)) or set(module.parameters()) for module in modules}
        asked = set().union(*own.values()) & set(self.engine.trained().values()) - self.spread
        if not asked or len(self.rows) < 2 or dry_run.current() is not None:
            return
        norms, _ = self._row_norms(self.rows, asked)
        alone = {parameter for parameter, norm in norms.items() if int(norm.count_nonzero()) == 1}
        chosen = [module for module, parameters in own.items() if not alone.isdisjoint(parameters)]
        if chosen:
            raise NotFollowed(chosen, "it is given samples that are chosen by the data")

    def _row_norms(
        self, rows: Tensor, some: Collection[nn.Parameter] | None = None
    ) -> tuple[dict[nn.Parameter, Tensor], list[nn.Parameter]]:
        """Return squared norms of the samples' gradients, (B,), by parameter, and parameters in backward's order.

        `some`: the parameters whose norms are asked for; None: all.
        """
        with self.untouched(), self.engine.state.trial(len(rows)):
            outputs = self._forward(self.call.forward, rows)
            if not outputs:
                return {}, []
            self.coarse = rounds_inside(nodes_behind(outputs))
            terms = list(map(_reduced, outputs))
            total = sum(terms[1:], terms[0])
            gradients_of(total, [])
            recorded = self.engine.state.take_recorded()
            recorded = [each for each in recorded if some is None or each[0].parameter in some]
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

    def _with_other(self, place: int) -> Tensor:
        """Return the rows, the one at `place` replaced by another sample."""
        rows = self.rows.clone()
        others = [row for row in range(self.call.batch) if row not in rows.tolist()]
        rows[place] = others[place % len(others)] if others else (rows[place] + 1) % self.call.batch
        return rows

    def try_other_samples(self, more: int = 0) -> None:
        """Run the tapped model forward on other samples, and `more` of them, for taps that look at what changes."""
        if self.call.batch < 2 or dry_run.current() is not None:
            return
        rows = (torch.cat([self.rows, self.rows[:more]]) + 1) % self.call.batch
        with self.untouched(), self.engine.state.trial(len(rows)):
            try:
                self._forward(self.call.forward, rows)
            except Unclipped:  # it takes gradients itself
                return
            except UserError:
                raise
            except (Exception, NotFollowed):
                return

    # -- losses --------------------------------------------------------------------------------------------------------

    def find_mixed(self) -> None:
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
        try:
            with self.untouched(), self.engine.state.trial(len(rows)):
                output = self._run(self.call.forward, rows)[place]
                gradients_of(_reduced(output), [])
                with self._closed(self.engine.state.take_recorded()) as micro:
                    return None if micro is None else micro.squared[0].sqrt().cpu()
        except UserError:
            raise
        except Exception:  # a model that takes no single sample, say
            return None

    # -- runs ----------------------------------------------------------------------------------------------------------

    def _arguments(self, rows: Tensor) -> tuple[Any, Any]:
        def chosen(leaf: Leaf) -> Leaf:
            if id(leaf) in self.sampled:
                return given_like(leaf, take(leaf, rows, self.sampled[id(leaf)]))
            return given_like(leaf, leaf.clone()) if isinstance(leaf, Tensor) else leaf

        with torch.no_grad():
            found: tuple[Any, Any] = replace_leaves(
                (self.call.args, self.call.kwargs), chosen, numbers=self.numbers(len(rows))
            )
        return found

    def _run(self, forward: Callable[..., Any], rows: Tensor | None = None) -> dict[OutputPlace, Tensor]:
        """Run the model on these rows, or on others; return the outputs, and losses in attributes, with a gradient."""
        args, kwargs = self._arguments(self.rows if rows is None else rows)
        self.engine.forwards.samples_tried += rows is not None
        with self.watched(), torch.enable_grad(), warnings.catch_warnings(), eagerly(), uncached_parametrizations():
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
        # Leaves are made of parameters alone, and refuse to be trained on (proxy.py).
        self.places = [place for place, dim in dims.items() if dim is None and not found[place].is_leaf]
        return [leaf for place, leaf in found.items() if isinstance(place, int)]

    def _dim_of(self, place: int, output: Tensor) -> int | None:
        """Return the dimension of samples; if it is not known, the first one of that size."""
        if self.output_dims is not None and place < len(self.output_dims):
            return self.output_dims[place]
        return next((dim for dim, size in enumerate(output.shape) if size == len(self.rows)), None)

    @contextmanager
    def _closed(self, recorded: Recorded, weights: Tensor | None = None) -> Iterator[MicroBatch | None]:
        """Close what a backward pass has recorded, to be normed, or summed with `weights`. None if that is nothing."""
        found = [(slot, parts) for slot, parts in recorded if parts]
        recorded.clear()  # what is recorded is let go as it is summed
        if not found:
            yield None
            return
        with torch.no_grad(), no_autocast(found[0][0].parameter.device.type):
            rules = self.engine.path_rules
            yield MicroBatch(found, rules=rules, clip=ClipRule(), mean=False, loss_scale=1.0, weights=weights)
        rules.close()

    # -- refusals ------------------------------------------------------------------------------------------------------

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


def rounds_inside(nodes: list[Any]) -> bool:
    """Return whether the model computed in 16 bits, whatever it returns: an autocast of its own, as Accelerate's is."""
    half, casts = (torch.bfloat16, torch.float16), ("device_autocast_kwargs", "cpu_autocast_kwargs")
    return any(
        any(part.dtype in half for part in getattr(node, "_input_metadata", ()))
        or any(getattr(node, cast, {}).get("enabled") for cast in casts)  # of a reentrant checkpoint
        for node in nodes
    )
