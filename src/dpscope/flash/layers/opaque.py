"""Any other module that owns parameters: one unit with all it contains, run sample by sample through torch.func.

Each parameter is replaced, inside the module's own forward, by B copies that are one and the same tensor (a view); the
module runs under vmap over samples, each seeing a batch of one; ordinary autograd then gives the copies' gradients,
which are the per-sample gradients. Nothing is computed twice, and random numbers are drawn as usual. Where vmap cannot
follow (data-dependent control flow, operators without a batching rule) the samples run one after the other.

At the first call of each kind, and at the 2nd, 4th, 8th, … of all, the module is also run on whole batches, without
gradients (`unit_check`): one whose answer for a batch is not what it answers for each sample alone is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import _StopRecomputationError

from dpscope.errors import UserError
from dpscope.flash.contributions import Kept
from dpscope.flash.explanation import why_opaque
from dpscope.flash.layers.sample_call import SampleCall
from dpscope.flash.layers.unit_check import UnitCheck
from dpscope.flash.layers.unit_state import UnitState
from dpscope.flash.rehearsal import OutputOf
from dpscope.flash.taps import Slot, TapOfSamples

# Where samples are not in dimension 0: argument name -> dimension (None: shared by all samples); outputs in order.
_DIMENSIONS: dict[type[nn.Module], tuple[dict[str, int | None], tuple[int, ...]]] = {
    nn.RNNBase: ({"hx": 1}, (0, 1, 1)),
    nn.MultiheadAttention: ({"attn_mask": None}, (0, 0)),
}


class Expand(torch.autograd.Function):
    """p -> (B, *shape), every sample the same p; backward hands the per-sample gradients to the engine."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, parameter: Tensor, batch: int, tap: OpaqueTap, slot: Slot) -> Tensor:
        ctx.tap, ctx.slot, ctx.generation = tap, slot, tap.engine.generation
        return parameter.expand(batch, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, ...]:
        engine = ctx.tap.engine
        if ctx.generation != engine.generation or torch.is_grad_enabled():
            engine.refuse_backward(ctx.tap.name, ctx.generation)
        if len(g):
            engine.add(ctx.slot, Kept(g, owned=False))
        else:
            engine.note_empty()
        return (None,) * 5


class _Call(nn.Module):
    """Lets functional_call replace the unit's parameters without running the unit's hooks a second time.

    Gives the output, and what forward left on the unit, which is taken off. The parameters are replaced by then: some
    modules (nn.LSTM) note them in attributes.
    """

    def __init__(self, unit: nn.Module, forward: Any) -> None:
        super().__init__()
        self.unit = unit
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        state = UnitState(self.unit)
        try:
            output = self._run(*args, **kwargs)
        finally:
            changes = state.take_changes()
        return output, changes


class OpaqueTap(TapOfSamples):
    def __init__(self, engine: Any, name: str, module: nn.Module) -> None:
        super().__init__(engine, name, module)
        self.call = _Call(module, self.original)
        self.output = OutputOf(self)
        self.slots = {key: engine.slot(parameter) for key, parameter in module.named_parameters()}
        self.input_dims, self.output_dims = next(
            (dims for cls, dims in _DIMENSIONS.items() if isinstance(module, cls)), ({}, ())
        )
        self.by_loop = False
        self.calls = 0
        self.dtypes: dict[Any, list[torch.dtype]] = {}  # kind of call -> dtypes of the module's own outputs
        self.per_sample: dict[Any, bool] = {}  # arguments of which it is known: SampleCall.key -> one entry a sample?
        for slot in self.slots.values():
            self._describe(slot, "torch.func.vmap over samples")

    def _describe(self, slot: Slot, how: str) -> None:
        name = "" if self.module is self.engine.model else self.name
        slot.describe("opaque", "", why_opaque(name, self.module, how))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs) if self.engine.run is None else self._rehearse(args, kwargs)
        live = {key: slot for key, slot in self.slots.items() if slot.parameter.requires_grad}
        if not live:
            return self.original(*args, **kwargs)
        for key, parameter in self.module.named_parameters():
            if key not in self.slots or self.slots[key].parameter is not parameter:
                self.engine.refuse_parameter(self.name, key)
        sample_call = SampleCall(self, args, kwargs)
        if sample_call.batch:
            self._check(sample_call)
        expanded = {
            f"unit.{key}": Expand.apply(self.engine.anchor, slot.parameter.detach(), sample_call.batch, self, slot)  # type: ignore[no-untyped-call]
            for key, slot in live.items()
        }
        # In backward it is a checkpointed forward that runs again: its state is written by the first.
        output = self.run(sample_call, expanded, commit=torch._C._current_graph_task_id() == -1)
        # A batched bias is added outside of autocast's sight: the module's own dtype is restored.
        dtypes = iter(self.dtypes.get(sample_call.kind(), ()))
        return pytree.tree_map(
            lambda leaf: leaf.to(next(dtypes, leaf.dtype)) if isinstance(leaf, Tensor) else leaf, output
        )

    def _rehearse(self, args: Any, kwargs: Any) -> Any:
        """The module's own answer, as a rehearsal wants it."""
        run = self.engine.run
        assert run is not None
        if not any(slot.parameter.requires_grad for slot in self.slots.values()):
            return self.original(*args, **kwargs)
        call = SampleCall(self, args, kwargs)
        x, dim = call.main()
        run.see(self, x, (dim,), shared=call.is_shared())
        leaves, spec = pytree.tree_flatten(self.original(*args, **kwargs))
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for position, index in enumerate(tensors):
            dim = call.output_dim(position)
            run.see(self.output, leaves[index], (dim,))
            leaves[index] = run.answer(self, leaves[index], dim, shared=call.is_shared())
        return pytree.tree_unflatten(leaves, spec)

    def _check(self, sample_call: SampleCall) -> None:
        """How the module treats a batch: not in every call, for it takes several forward passes."""
        self.calls += 1
        check = UnitCheck(self, sample_call)
        if sample_call.undecided:
            check.decide()
        kind = sample_call.kind()
        if kind not in self.dtypes or self.calls & (self.calls - 1) == 0:
            self.dtypes[kind] = check.run()

    def run(self, sample_call: SampleCall, expanded: dict[str, Tensor], *, commit: bool) -> Any:
        """`commit`: what all samples have left on the module is written to it."""
        if sample_call.batch == 0:
            return sample_call.on_empty_batch(expanded)
        if not self.by_loop:
            try:
                return sample_call.by_vmap(expanded, commit=commit)
            except (UserError, _StopRecomputationError):
                raise  # a checkpointed forward that runs again is stopped, by an exception, once it has all it needs
            except Exception as error:  # whatever vmap cannot follow; the loop meets real mistakes again
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                self.by_loop = True
                for slot in self.slots.values():
                    self._describe(slot, f"a loop over samples, for vmap failed: {reason}")
<<<<<<< HEAD
        return sample_call.by_loop(expanded)

    def _check(self, output: Any, sample_call: _SampleCall, args: Any, kwargs: Any) -> list[torch.dtype]:
        """The first answer against that of the module itself on the whole batch, whose dtypes are given back."""
        found = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        devices = {leaf.device for leaf in found if leaf.is_cuda}
        with torch.no_grad(), torch.random.fork_rng(devices):
            expected, again = (
                [leaf for leaf in pytree.tree_leaves(self.original(*args, **kwargs)) if isinstance(leaf, Tensor)]
                for _ in range(2)
            )
        for mine, once, twice in zip(found, expected, again, strict=True):
            if not sample_call.mapped and once.dim() and once.shape[0] == 1:
                once = once.expand(mine.shape)  # noqa: PLW2901 - an answer shared by all samples
                twice = twice.expand(mine.shape)  # noqa: PLW2901
            if mine.shape != once.shape:
                raise UserError(
                    f"{self.name} ({type(self.module).__name__}) gave {tuple(once.shape)} for a batch but "
                    f"{tuple(mine.shape)} from its samples one by one: {KEEP_BATCH_FIRST}"
                )
            close = torch.allclose(mine.double(), once.double(), rtol=0.05, atol=0.05, equal_nan=True)
            if torch.equal(once, twice) and not close:
                raise UserError(
                    f"{self.name} ({type(self.module).__name__}) answers differently for a batch than for its samples "
                    "one by one: it mixes samples, so no sample has a gradient of its own; replace it by a module "
                    "that treats samples apart"
                )
        return [leaf.dtype for leaf in expected]


class _SampleCall:
    """One call of a unit, taken apart into what belongs to each sample and what is shared."""

    def __init__(self, tap: OpaqueTap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tap = tap
        self.args_count = len(args)
        names = _argument_names(tap.original, args, kwargs)
        self.leaves: list[Any] = []
        self.specs: list[Any] = []
        leaf_names: list[str] = []
        for name, value in zip(names, (*args, *kwargs.values()), strict=True):
            leaves, spec = pytree.tree_flatten(value)
            self.leaves += leaves
            self.specs.append(spec)
            leaf_names += [name] * len(leaves)
        self.kwarg_names = list(kwargs)
        self.batch = tap.engine.batch_for(tap, args, kwargs)
        self.mapped: dict[int, int] = {}  # leaf -> dimension of samples
        self.expanded: set[int] = set()  # leaves that had one row for all samples
        main = True
        for index, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                self._place(index, leaf, leaf_names[index], main)
                main = False
        tap.engine.admit_unit(tap, self.main()[0].dim(), shared=self.is_shared())

    def main(self) -> tuple[Tensor, int]:
        """The first tensor that has a row for each sample, and the dimension of samples."""
        index = next((index for index in self.mapped if index not in self.expanded), next(iter(self.mapped), None))
        return (torch.empty(0), 0) if index is None else (self.leaves[index], self.mapped[index])

    def is_shared(self) -> bool:
        """Whether all samples share what the unit was given."""
        return self.batch != 1 and self.expanded >= self.mapped.keys()

    def precision(self) -> Any:
        """What the dtypes of the outputs depend on; one sample alone shows nothing of how a module treats several."""
        dtypes = tuple(leaf.dtype for leaf in self.leaves if isinstance(leaf, Tensor))
        devices = {leaf.device.type for leaf in self.leaves if isinstance(leaf, Tensor)} or {"cpu"}
        return (
            self.batch > 1,
            dtypes,
            *(torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)),
        )

    def _dim(self, name: str) -> int | None:
        return self.tap.input_dims.get(name, 0)

    def _place(self, index: int, leaf: Tensor, name: str, main: bool) -> None:
        dim = self._dim(name)
        size = leaf.shape[dim] if dim is not None and leaf.dim() > dim else None
        if dim is not None and size == self.batch:
            self.mapped[index] = dim
        elif dim is not None and size == 1 and (leaf.requires_grad or main):
            shape = [self.batch if axis == dim else length for axis, length in enumerate(leaf.shape)]
            self.leaves[index] = leaf.expand(shape)
            self.mapped[index] = dim
            self.expanded.add(index)
        elif leaf.requires_grad or (main and leaf.dim()) or (name in self.tap.input_dims and leaf.dim() > 2):
            raise UserError(
                f"{self.tap.name} was given a tensor of shape {tuple(leaf.shape)} in a batch of {self.batch} samples: "
                f"{KEEP_BATCH_FIRST}"
            )

    def _call(self, parameters: dict[str, Tensor], leaves: list[Any]) -> tuple[list[Any], Any]:
        values, start = [], 0
        for spec in self.specs:
            values.append(pytree.tree_unflatten(leaves[start : start + spec.num_leaves], spec))
            start += spec.num_leaves
        args = tuple(values[: self.args_count])
        kwargs = dict(zip(self.kwarg_names, values[self.args_count :], strict=True))
        output = functional_call(self.tap.call, parameters, args, kwargs)
        found, spec = pytree.tree_flatten(output)
        for leaf in found:
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                raise UserError(
                    f"{self.tap.name} returns a {type(leaf).__name__}; flash clipping needs tensors, in tuples, lists "
                    "or dictionaries"
                )
        return found, spec

    def _with(self, replacements: Any) -> list[Any]:
        leaves = list(self.leaves)
        for index, leaf in zip(self.mapped, replacements, strict=True):
            leaves[index] = leaf
        return leaves

    def output_dim(self, position: int) -> int:
        dims = self.tap.output_dims
        return dims[position] if position < len(dims) else 0

    def on_empty_batch(self, expanded: dict[str, Tensor]) -> Any:
        parameters = {key: value.sum(0) for key, value in expanded.items()}
        return pytree.tree_unflatten(*self._call(parameters, self.leaves))

    def by_vmap(self, expanded: dict[str, Tensor]) -> Any:
        shape: list[Any] = []

        def one(parameters: dict[str, Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
            inputs = tuple(leaf.unsqueeze(dim) for leaf, dim in zip(inputs, self.mapped.values(), strict=True))
            found, spec = self._call(parameters, self._with(inputs))
            shape[:] = [found, spec]
            tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
            return tuple(self._without_batch(leaf, position) for position, leaf in enumerate(tensors))

        inputs = [self.leaves[index] for index in self.mapped]
        with _PaddingRows():
            stacked = vmap(one, in_dims=(0, *self.mapped.values()), randomness="different")(expanded, *inputs)
        found, spec = shape
        tensors = iter([leaf.movedim(0, self.output_dim(position)) for position, leaf in enumerate(stacked)])
        return pytree.tree_unflatten([next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in found], spec)

    def _without_batch(self, leaf: Tensor, position: int) -> Tensor:
        dim = self.output_dim(position)
        if leaf.dim() <= dim or leaf.shape[dim] != 1:
            raise UserError(
                f"{self.tap.name} gave a tensor of shape {tuple(leaf.shape)} for one sample: {KEEP_BATCH_FIRST}"
            )
        return leaf.squeeze(dim)

    def by_loop(self, expanded: dict[str, Tensor]) -> Any:
        split = {key: value.unbind(0) for key, value in expanded.items()}
        inputs = [self.leaves[index].split(1, dim) for index, dim in self.mapped.items()]
        answers = []
        for b in range(self.batch):
            parameters = {key: values[b] for key, values in split.items()}
            found, spec = self._call(parameters, self._with(chunks[b] for chunks in inputs))
            answers.append(found)
        joined, position = [], 0
        for leaves in zip(*answers, strict=True):
            if isinstance(leaves[0], Tensor):
                for leaf in leaves:
                    self._without_batch(leaf, position)
                joined.append(torch.cat(leaves, self.output_dim(position)))
                position += 1
            else:
                joined.append(leaves[0])
        return pytree.tree_unflatten(joined, spec)


def _argument_names(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The parameter names of forward for args, then those of kwargs."""
    positional = [
        parameter.name
        for parameter in inspect.signature(forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    names = [*positional, *(f"argument {index}" for index in range(len(positional), len(args)))]
    return [*names[: len(args)], *kwargs]
=======
        return sample_call.by_loop(expanded, commit=commit)
