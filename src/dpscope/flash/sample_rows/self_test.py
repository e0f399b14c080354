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
large on the side of the engine alone. The first time a model is called in some way, the other half is silent then, and
what the engine has for it has to be zero. This also finds parameters with tiny gradients whose rows are not the
samples, which rounding would hide in a sum.

Where weighted sums prove nothing, and for outputs without rows, one sample is replaced by another (row_norms.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad as pad_zeros

from dpscope.endings import lacks_memory
from dpscope.errors import UserError
from dpscope.flash.gradients.contributions import Contribution
from dpscope.flash.gradients.slots import OWN_GRADIENTS
from dpscope.flash.oracle import gradients_of
from dpscope.flash.sample_rows.comparison import SLICE, is_coarse, largest_difference
from dpscope.flash.sample_rows.proxy import Mismatch, NotFollowed
from dpscope.flash.sample_rows.row_norms import RowNorms, TestedEngine, rounds_inside
from dpscope.flash.sample_rows.tried_call import RootCall, TriedCall
from dpscope.flash.step.step_state import Recorded
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.arguments import tensors_in
from dpscope.flash.torch_side.autocast import no_autocast
from dpscope.flash.torch_side.autograd_graph import leaves_behind, nodes_behind
from dpscope.flash.torch_side.dry_run import read
from dpscope.flash.torch_side.left_graphs import LeftGraphs
from dpscope.flash.torch_side.shards import lies_here
from dpscope.random_states import RandomStates

# How far two ways to compute an output may be apart, of its largest element.
_OUTPUTS = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF_OUTPUTS = 0.05
_DIFFERENT = (
    "the gradient of {name} that flash clipping makes is not ordinary autograd's (off by {off} of its size). If a hook "
    "or an autograd.Function mixes samples in backward, remove it"
)
SILENT_WEIGHT = 1e4
"""Of samples without a cotangent, in the engine's sums."""
_LEAST, _MOST = 1e-15, 1e15  # norms whose squares float32 can hold, and those of their elements that count
_LOUD = 2.0**10
"""Factor of all weights, unless a model computes in 16 bits: a backward pass that clips what is large is not linear."""

HELD_BYTES = 2**28
"""Of autograd's gradients: if all take more, their projections are held while the engine makes its sums."""
PROJECTIONS = 4
_BLOCK = 256  # elements that are projected together

TakeSums = Callable[[list[nn.Parameter], list[Tensor]], None]
Errors = list[tuple[list[nn.Parameter], Tensor]]  # norms of the sums' errors, (parameters,)


Truths = dict[nn.Parameter, Tensor]  # gradients as autograd makes them, or projections of them


class SelfTest(RowNorms):
    """One test of a call. `again`: of a way to call the model that was tested before, with other halves."""

    def __init__(
        self,
        engine: TestedEngine,
        call: RootCall,
        tried: TriedCall,
        *,
        seed: int,
        again: bool = False,
        output_dims: Sequence[int | None] | None = None,
    ) -> None:
        super().__init__(engine, call, tried, output_dims=output_dims)
        self.seed, self.again = seed, again
        rows = len(self.rows)
        order = torch.randperm(rows, generator=_seeded("cpu", seed))
        spread = torch.linspace(0.5, 1.5, rows, dtype=torch.float64)
        self.weights = torch.where(order % 2 == 0, spread[order], -spread[order])  # no two are alike
        self.first_half = order < -(-rows // 2)
        self.loudness = 1.0  # factor of the weights
        self.has_rows = False  # whether an output has a row for each sample
        self.holds_gradients = False  # whatever they take
        # Outputs and gradients of the untouched model, until they are compared: other taps may have to be tried first.
        self._truth: tuple[list[Tensor], Truths] | None = None
        self._sizes = self.weights  # norms of autograd's gradients, (parameters,), once they are known

    def run(self) -> None:
        """Raise NotFollowed for a module whose taps do not do what it does."""
        names = self.engine.trained()
        if not names:
            return
        with self.opened_gates():
            if not self._compare(names):
                self.compare_rows()
            self.find_mixed()

    def _compare(self, names: dict[str, nn.Parameter]) -> bool:
        if self._truth is None:
            self._truth = self._of_untouched(list(names.values()))
        if self._truth is None:
            return False
        with self.untouched(), self.engine.state.trial(len(self.rows)):
            wrong, errors, order, leaking = self._tapped(*self._truth)
        if wrong and self._is_random():
            return False  # what draws random numbers sample by sample draws others than for a batch
        bad = self._bad_sums(names.values(), errors) or leaking
        if bad and not self.holds_gradients:  # projections tell the size of an error roughly
            self.holds_gradients = True
            return self._compare(names)
        if bad:
            self._raise_for(bad, order, {parameter: name for name, parameter in names.items()}, _DIFFERENT)
        if wrong:
            raise Mismatch([self.model], f"with taps the model gives another output than without ({wrong})")
        return self.has_rows

    def _of_untouched(self, parameters: list[nn.Parameter]) -> tuple[list[Tensor], Truths] | None:
        """Return outputs and gradients without taps; None if no output has a gradient."""
        with self.untouched(), self.alone():
            outputs, expected, left = self._ordinary(parameters)
        self._refuse_left(left)
        if expected is None:
            return None
        self.holds_gradients |= sum(each.nbytes for each in expected if each is not None) <= HELD_BYTES
        gradients = [p.new_zeros(()) if each is None else each for p, each in zip(parameters, expected, strict=True)]
        del expected
        self._sizes = _norms(gradients)
        gradients.reverse()  # each is let go once it is projected
        return outputs, {parameter: self._compared(gradients.pop()) for parameter in parameters}

    def _compared(self, tensor: Tensor) -> Tensor:
        """Return a gradient, or projections of each block of it on random signs, (blocks, PROJECTIONS) float64.

        Those of a difference δ are together as large as ‖δ‖ in the mean of squares, whatever δ is.
        """
        if self.holds_gradients or not lies_here(tensor) or not tensor.dim():
            return tensor
        random = _seeded(tensor.device, self.seed)
        signs = torch.randint(2, (_BLOCK, PROJECTIONS), generator=random, device=tensor.device).double() * 2 - 1
        signs /= PROJECTIONS**0.5
        parts = torch.split(tensor.detach().reshape(-1), SLICE)
        blocks = (pad_zeros(part.double(), (0, -len(part) % _BLOCK)).view(-1, _BLOCK) for part in parts)
        return torch.cat([each @ signs for each in blocks])

    def _refuse_left(self, left: LeftGraphs) -> None:
        """Refuse a loss that forward keeps where nobody can look: in a list of its file, say.

        What stays the same for other samples (a weight that is derived of others) is no loss.
        """
        kept = [tensor for tensor in left.tensors() if len(self.rows) not in tensor.shape]
        if not kept:
            return
        with self.untouched(), self.alone(), (again := LeftGraphs()):
            again.mark(nodes_behind(self._forward(self.model.forward, (self.rows + 1) % self.call.batch)))
        others = again.tensors()
        for tensor in kept:
            if not any(tensor.shape == other.shape and torch.equal(tensor, other) for other in others):
                raise UserError(
                    f"forward keeps a tensor of shape {tuple(tensor.shape)} with its history outside of the model's "
                    "modules, and it has no row for each sample: a loss made of it may mix samples. Return it from "
                    "forward, keep it in an attribute of a module, or detach it"
                )

    # -- the two runs --------------------------------------------------------------------------------------------------

    def _ordinary(self, parameters: list[nn.Parameter]) -> tuple[list[Tensor], list[Tensor | None] | None, LeftGraphs]:
        """Return outputs, the gradients for cotangents whose rows are multiplied by the weights, and what is left."""
        before, left = RandomStates.now(self.devices), LeftGraphs()
        with left if dry_run.current() is None else nullcontext():
            outputs = self._forward(self.model.forward)
        self.draws = not before.equals(RandomStates.now(self.devices))
        nodes = nodes_behind(outputs)
        left.mark(nodes)
        if not outputs:
            return [], None, left
        self.has_rows = any(dim is not None for dim in self.dims)
        self.coarse = rounds_inside(nodes)
        full = {tensor.dtype for tensor in (*outputs, *parameters)} <= set(_OUTPUTS) and not self.coarse
        self.loudness = _LOUD if full and dry_run.current() is None else 1.0
        total = self._total(outputs, self.first_half, weighted=True)
        with OWN_GRADIENTS.taken(), no_autocast(total.device.type):
            found = _gradients(total, parameters, nodes)
        return [output.detach() for output in outputs], list(found), left

    def _tapped(
        self, expected: list[Tensor], gradients: Truths
    ) -> tuple[str, Errors, list[nn.Parameter], dict[nn.Parameter, float]]:
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
        wrong, self._truth = self._differing(expected, outputs), None
        expected.clear()
        past = {leaf for leaf in leaves_behind(outputs) if isinstance(leaf, nn.Parameter)}
        if past:
            raise self.stray(past)
        gradients_of(self._total(outputs, self.first_half, weighted=False), [])
        outputs.clear()
        recorded = self.engine.state.take_recorded()
        order = [slot.parameter for slot, _ in recorded]
        weights = self.loudness * self.weights.masked_fill(~self.first_half, SILENT_WEIGHT)
        errors: Errors = []

        def compare(parameters: list[nn.Parameter], sums: list[Tensor]) -> None:
            truths = [gradients.pop(parameter) for parameter in parameters]
            errors.append((parameters, _norms(list(map(self._compared, sums)), truths)))

        self._sum(recorded, weights if self.has_rows else torch.ones_like(weights), compare)
        if not self.has_rows or len(self.rows) < 2 or self.again:
            return wrong, errors, order, {}
        try:
            leaking = self._leaking(self.rows.roll(1) if dry_run.current() is None else None)
        except (UserError, NotFollowed):
            raise
        except Exception as error:  # a model that asks for samples in a given order, say sorted by length
            if lacks_memory(error):
                raise
            leaking = self._leaking(None)
        return wrong, errors, order, leaking

    def _leaking(self, rows: Tensor | None) -> dict[nn.Parameter, float]:
        """Return the parameters that have something for a silent sample, with the other half silent.

        The samples come in another order, `rows`, if it is given: a model that sorts them may have been given sorted
        ones before.
        """
        found: Errors = []
        silent = self.first_half.to(self.weights.dtype)
        with self.engine.state.trial(len(self.rows)):
            gradients_of(self._total(self._forward(self.call.forward, rows), ~self.first_half, weighted=False), [])
            recorded = self.engine.state.take_recorded()
            self._drop_silent(recorded)
            self._sum(recorded, silent, lambda those, sums: found.append((those, _norms(sums))))
        return {parameter: size for parameter, size in _read(found) if size and math.isfinite(size)}

    def _drop_silent(self, recorded: Recorded) -> None:
        """Drop parameters with no gradient in the first half's rows: their sums would be zero.

        Note those of which several samples of the other half have a gradient.
        """
        linear = [[_linear_in(part) for part in uses] for _, uses in recorded]
        by_sample = {id(each): each for those in linear for each in those if each is not None and len(each)}
        if dry_run.current() is not None or {len(each) for each in by_sample.values()} != {len(self.rows)}:
            return
        flat = [each.flatten(1) if each.dim() > 1 else each[:, None] for each in by_sample.values()]
        counts = torch.stack([torch.linalg.vector_norm(each, 0, dim=1) for each in flat])  # of what is not zero
        half = self.first_half.to(counts.device)
        found = torch.stack([counts[:, half].any(1), counts[:, ~half].count_nonzero(1) > 1], 1).tolist()
        silent = {key for key, (is_reached, _) in zip(by_sample, found, strict=True) if not is_reached}
        several = {key for key, (_, is_spread) in zip(by_sample, found, strict=True) if is_spread}
        pairs = zip(recorded, linear, strict=True)
        self.spread = {slot.parameter for (slot, _), those in pairs if not several.isdisjoint(map(id, those))}
        recorded[:] = [each for each, those in zip(recorded, linear, strict=True) if {*map(id, those)} - silent]

    def _sum(self, recorded: Recorded, weights: Tensor, take: TakeSums) -> None:
        """Give the engine's weighted sums of what was recorded to `take`, a few at a time, which may overwrite them."""
        with self._closed(recorded, weights) as micro:
            for batch in () if micro is None else micro.sums(into=None, factored=False):
                take(batch.parameters, batch.tensors)
                del batch

    def stray(self, parameters: Collection[nn.Parameter]) -> NotFollowed:
        """Return the refusal of parameters that are used outside of the modules that own them."""
        names = [name for name, parameter in self.engine.trained().items() if parameter in set(parameters)]
        owners = [self.model.get_submodule(name.rpartition(".")[0]) for name in names]
        return NotFollowed(owners, "a parameter is used outside of the module that owns it", strays=parameters)

    # -- cotangents ----------------------------------------------------------------------------------------------------

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
            apart, size = largest_difference(mine.detach(), other)
            if apart > tolerance * size + 1e-30:
                return f"{apart / max(size, 1e-30):.1e} of its size"
        return ""

    def _is_random(self) -> bool:
        """Return whether samples run one by one and the model draws random numbers."""
        if not self.engine.runs_by_sample():
            return False
        runs = []
        for seed in (1, 2):
            with self.untouched():
                runs.append([each.detach() for each in tensors_in(self.tried.run_on(self.rows.tolist(), seed=seed))])
        return any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*runs, strict=True))

    def _bad_sums(self, parameters: Collection[nn.Parameter], errors: Errors) -> dict[nn.Parameter, float]:
        """Return the parameters whose sums differ, or are missing, with the relative error."""
        sizes, error = read(self._sizes, 0.0), dict(_read(errors))
        whole = math.hypot(*(each for each in sizes if math.isfinite(each)))
        bad = {}
        for parameter, own in zip(parameters, sizes, strict=True):
            (share, floor), off = self._tolerance(parameter), error.get(parameter, own)
            if math.isfinite(own) and not off <= share * own + floor * whole:  # what is no number has no size
                bad[parameter] = off / max(own, 1e-30)
        return bad


def _gradients(total: Tensor, parameters: list[nn.Parameter], nodes: list[Any]) -> Sequence[Tensor | None]:
    """Return autograd's gradients; by `backward` if there is a reentrant checkpoint, which `grad` does not enter."""
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes):
        return gradients_of(total, parameters)
    torch.clear_autocast_cache()  # which would hold casts that backward could let go
    return torch.autograd.grad(total, parameters, allow_unused=True)


def _linear_in(part: Contribution) -> Tensor | None:
    """Return the tensor, (B, ...), that a contribution is linear in, sample by sample; None if it cannot be seen."""
    return next((each for each in (*part.saved[1:], part.values, part.summed_later) if each is not None), None)


def _read(errors: Errors) -> Iterator[tuple[nn.Parameter, float]]:
    """Yield parameters with their norms, for which the host waits once."""
    if errors:
        norms = read(torch.cat([norms for _, norms in errors]), 0.0)
        yield from zip((parameter for those, _ in errors for parameter in those), norms, strict=True)


def _norms(tensors: list[Tensor], minus: list[Tensor] | None = None) -> Tensor:
    """Return norms in float64, (tensors,): of tensors, or of their differences from others, which take their place."""
    # On a GPU two operators do this for all tensors. A CPU takes five times as long for float64 as for float32.
    if minus is not None:
        torch._foreach_sub_(tensors, minus)
    if dry_run.current() is not None or any(tensor.device.type != "cpu" for tensor in tensors):
        return torch.stack(torch._foreach_norm(tensors, 2, torch.float64))
    norms = torch.stack(torch._foreach_norm(tensors)).double()
    for place, norm in enumerate(norms.tolist()):
        if not _LEAST < norm < _MOST:
            norms[place] = torch.linalg.vector_norm(tensors[place], dtype=torch.float64)
    return norms


def _seeded(device: torch.device | str, seed: int) -> torch.Generator | None:
    is_there = dry_run.current() is None or torch.device(device).type == "cpu"
    return torch.Generator(device).manual_seed(seed) if is_there else None
