"""One forward pass of a rehearsal: what every layer was given; the outputs of layers may be changed in one row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dpscope.flash.torch_side.dry_run import read
from dpscope.flash.torch_side.module_state import ModuleState
from dpscope.random_states import RandomStates, cuda_devices

Key = tuple[Any, int]  # a tap, OutputOf one, or None for the model's output; and the how-many-th of its tensors
EVERY_OUTPUT: frozenset[Key] = frozenset([(None, -1)])  # `keep` of a run whose outputs are all wanted
_LEAVES = frozenset([Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device])
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Sampled(Protocol):
    """A module whose input has a row for each sample (`known`), or one for all of them (`shared`).

    Both hold the numbers of dimensions of x for which this is known.
    """

    name: str
    module: nn.Module
    known: set[int]
    shared: set[int]


@dataclass(eq=False)
class OutputOf:
    """Key in place of a tap, for the output of a unit of several operations."""

    unit: Sampled


@dataclass
class SeenTensor:
    """One tensor seen in a run: `dims` may hold the samples; `shared`: it had one row for all of them."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    prints: list[Tensor] = field(default_factory=list)  # of each of `dims`: (B, 2), equal where rows are equal
    value: Tensor | None = None
    shared: bool = False


class Run:
    """One forward pass. `row`: the sample whose layer outputs are changed; `only`: of that tap alone."""

    def __init__(
        self,
        batch: int,
        row: int | None = None,
        *,
        only: Any = None,
        expand: bool = True,
        keep: frozenset[Key] = frozenset(),
    ) -> None:
        self.batch = batch
        self.row = row
        self.only = only
        self.expand = expand
        self.keep = keep  # tensors whose values are wanted
        self.shifted = False  # the output of every layer is changed in all rows
        self.seen: dict[Key, SeenTensor] = {}
        self.constants: dict[Key, Tensor] = {}  # fingerprints of operands that may have nothing of the samples
        self.inside = 0  # layers' own forwards that run
        self._counts: Counter[Any] = Counter()

    def see(self, tap: Sampled | OutputOf | None, x: Tensor, dims: tuple[int, ...], *, shared: bool = False) -> None:
        key = (tap, self._counts[tap])
        self._counts[tap] += 1
        dims = tuple(dim for dim in dims if x.dim() > dim and x.shape[dim] == self.batch)
        seen = self.seen[key] = SeenTensor(tuple(x.shape), dims, shared=shared)
        seen.prints = [fingerprints(x, dim) for dim in dims]
        if key in self.keep or (tap is None and self.keep is EVERY_OUTPUT):
            seen.value = x.detach().clone()

    def note_layer(self, tap: Sampled, x: Tensor, y: Tensor, *, shared: bool) -> None:
        """Note that a layer was given x and returned y."""

    @contextmanager
    def inside_layer(self) -> Iterator[None]:
        """Allow the use of parameters inside the block, where their layer runs."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def see_constant(self, tap: Sampled, x: Tensor) -> None:
        """Note a tensor that is to be the same whatever the samples are."""
        key = (tap, self._counts[tap])
        self._counts[tap] += 1
        self.constants[key] = fingerprints(x.unsqueeze(0), 0)

    def answer(self, tap: Sampled, y: Tensor, dim: int = 0, *, shared: bool = False) -> Tensor:
        """Return a layer's output for a rehearsal: one row for all samples becomes B rows, and `row` is changed."""
        if y.dim() <= dim:
            return y
        if shared and y.shape[dim] == 1 and self.expand:
            y = y.expand([self.batch if axis == dim else size for axis, size in enumerate(y.shape)])
        if y.shape[dim] != self.batch or not y.is_floating_point() or not y.numel():
            return y
        rows: list[int] = list(range(self.batch)) if self.shifted else []
        if self.row is not None and (self.only is None or self.only is tap):
            rows.append(self.row)
        # A copy in every run, changed or not: in another layout sums are in another order, and round differently.
        y = y.clone()
        for row in rows:
            part = y.select(dim, row)
            # Neither constant nor small, so that no normalisation and no rounding takes it away again.
            size = 1 + torch.maximum(-part.amin(), part.amax())
            part.add_(torch.arange(part.numel(), dtype=torch.int32, device=y.device).cos().mul_(size).view_as(part))
        return y


class ParametersUsed(TorchFunctionMode):
    """Collects the trainable parameters that torch functions are given outside of layers."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.found: set[nn.Parameter] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.run.inside:
            return result
        given = [*args, *kwargs.values()] if kwargs else args
        # Most functions are given tensors and numbers alone; pytree would take as long as many of them.
        leaves = given if _LEAVES.issuperset(map(type, given)) else pytree.tree_leaves(given)
        found = {leaf for leaf in leaves if type(leaf) is nn.Parameter and leaf.requires_grad}
        if found and not _cuts(func) and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            self.found |= found
        return result


def _cuts(func: Any) -> bool:
    """Return whether no gradient goes through: p.detach(), p.data."""
    return getattr(func, "__name__", "") == "detach" or getattr(func, "__self__", None) is Tensor.data


def fingerprints(x: Tensor, dim: int) -> Tensor:
    """Return sums of the bits of each sample's elements, (B, 2) integers: of all elements, and of every other one."""
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    rows = x.movedim(dim, 0).reshape(x.shape[dim], -1)
    bits = rows if rows.dtype == torch.bool else rows.view(_BITS[rows.element_size()])
    return torch.stack([bits.sum(1, dtype=torch.int64), bits[:, ::2].sum(1, dtype=torch.int64)], 1)


class Buffers:
    """The buffers of a model as they are now: which tensors, and their values."""

    def __init__(self, model: nn.Module) -> None:
        self._owned = [(module, dict(module._buffers)) for module in model.modules()]
        tensors = {id(each): each for _, own in self._owned for each in own.values() if each is not None}
        self._values = [(each, each.clone()) for each in tensors.values() if not each.is_inference()]
        self._versions = [each._version for each, _ in self._values]

    def put_back(self) -> None:
        for module, buffers in self._owned:
            module._buffers.clear()
            module._buffers.update(buffers)
        for place, (buffer, value) in enumerate(self._values):
            if buffer._version != self._versions[place]:
                buffer.copy_(value)
                self._versions[place] = buffer._version


class ModelSnapshot:
    """Random states, buffers and attributes of a model as they are now, to be put back after runs of it."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes, self._buffers = ModuleState(model), Buffers(model)
        self._random = RandomStates.now(cuda_devices(model))
        generators = {id(v): v for m in model.modules() for v in vars(m).values() if isinstance(v, torch.Generator)}
        self._own = [(generator, generator.get_state()) for generator in generators.values()]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put everything back after the block."""
        try:
            yield
        finally:
            self._buffers.put_back()
            self._random.put_back()
            for generator, state in self._own:
                generator.set_state(state)
            self._attributes.restore()
            # Casts of weights made without gradients would be taken for those of the real forward.
            torch.clear_autocast_cache()


@contextmanager
def opened_gates(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Fill parameters that are zero inside the block: a closed gate, or LoRA's B, would hide what it multiplies."""
    parameters = list(parameters)
    opened = [parameter.detach().any().cpu() for parameter in parameters]
    is_open = read(torch.stack(opened), True) if opened else []
    closed = [parameter.data for parameter, opens in zip(parameters, is_open, strict=True) if not opens]
    for index, gate in enumerate(closed):
        values = torch.randn(gate.shape, generator=torch.Generator().manual_seed(index))
        gate.copy_(0.1 * values)
    try:
        yield
    finally:
        for gate in closed:
            gate.zero_()


def untouched(model: nn.Module) -> AbstractContextManager[None]:
    """Restore random states, buffers and attributes of the model after the block."""
    return ModelSnapshot(model).kept()
