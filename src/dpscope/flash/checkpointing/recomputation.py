"""One backward pass through a checkpointed block, from which the block can be run once more, and its fingerprint.

It keeps the block's input, the gradients of its outputs, and every other state that a forward depends on (random
numbers, autocast). Run again from there, every layer of the block sees the x and g that it saw in the backward pass:
the same operations on the same values. So its gradients need not be held until the factors are known.

Fingerprints check that. The contributions of the layers are projected on fixed signs, sample by sample
(kernels/kept_gradients.py). A difference δ between two runs moves the projection by about ‖δ‖, in any direction;
rounding moves it by about ε‖g‖. Norms are compared as well: rounding hardly changes them, and a common factor changes
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpscope.errors import UserError
from dpscope.flash.gradients.contributions import Contribution, held
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.kernels.float32_products import operand_rounding
from dpscope.flash.kernels.kept_gradients import projections
from dpscope.flash.step.microbatch import SumBatch
from dpscope.flash.torch_side import dry_run
from dpscope.random_states import RandomStates

# -- fingerprints ------------------------------------------------------------------------------------------------------


Left = dict[Slot, list[Contribution]]  # what the layers of a block leave

# How far a projection may move, of the norm of all gradients of the block. Where kernels repeat themselves it does not
# move at all. Where they add in any order (attention's, on a GPU) elements round another way, and so does what follows
# from them, until about half a unit of the last place differs everywhere: 3e-3 of the norm in bf16; this is six times
# as much.
REPEATED = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
REPEATED_TF32 = 5e-3
NORM_IS_STEADIER = 4.0
"""How much less a norm may move than a projection."""


LEFT_SUMS, LEFT_GRADIENTS, LEFT_INPUTS = "sums over positions", "gradients of positions", "inputs"


def project(left: Left) -> dict[str, Tensor]:
    """Return projections and squares of each kind, (2, B). Inputs only if every layer has left something."""
    found: dict[str, tuple[list[Tensor], list[int]]] = {}

    def add(kind: str, tensor: Tensor, number: int) -> None:
        values, numbers = found.setdefault(kind, ([], []))
        values.append(tensor)
        numbers.append(number)

    complete = all(left.values())
    for number, parts in enumerate(left.values()):
        for part in parts:
            add(LEFT_GRADIENTS if part.saved else LEFT_SUMS, gradient_of(part), number)
            if complete and part.saved:
                x = part.saved[0]
                add(LEFT_INPUTS, x if x.is_floating_point() else x.double(), number)  # ids are numbers as good as any
    return projections(found) if found else {}


class Fingerprint(NamedTuple):
    """Fingerprint of a backward pass: the result of `project`, and the tolerance, relative to the norm of its kind.

    Sums over positions (biases, norm layers) are larger than the gradients of positions: each kind has its own norm.
    """

    kinds: dict[str, Tensor]
    tolerance: float

    @classmethod
    def of(cls, left: Left, dtypes: Collection[torch.dtype]) -> Fingerprint:
        """Return the fingerprint of a block that computes in `dtypes` and in those of its layers' contributions."""
        tensors = [gradient_of(part) for parts in left.values() for part in parts]
        dtypes = {*dtypes, *(tensor.dtype for tensor in tensors)}
        in_tf32 = torch.float32 in dtypes and operand_rounding(tensors[0].device) > 0.0
        tolerance = max(REPEATED_TF32 if in_tf32 else 0.0, *(REPEATED.get(dtype, 0.0) for dtype in dtypes))
        return cls(project(left), tolerance)


def different(before: Sequence[Fingerprint], again: Sequence[dict[str, Tensor]], finite: Tensor | None) -> list[bool]:
    """Return True for each block whose rerun differs, for any sample with a share (any finite one, if unknown).

    `again`: the result of `project` for each. All blocks are compared at once; the host waits for the device once.
    """
    if dry_run.current() is not None:
        return [False] * len(before)
    blocks, pairs = [], []
    for block, (each, others) in enumerate(zip(before, again, strict=True)):
        for kind, found in each.kinds.items():
            other = others.get(kind)
            # Of layers that left nothing, zeros: but their inputs may be any.
            if other is not None or kind != LEFT_INPUTS:
                blocks.append(block)
                pairs.append((found, torch.zeros_like(found) if other is None else other))
    first, second = (torch.stack(side) for side in zip(*pairs, strict=True))  # (blocks × kinds, 2, B)
    tolerances = first.new_tensor([before[block].tolerance for block in blocks]).unsqueeze(1)
    projected, norm = first[:, 0], first[:, 1].sqrt()
    judged = projected.isfinite() & norm.isfinite()
    if finite is not None:
        judged &= finite
    same = (projected - second[:, 0]).abs() <= tolerances * norm
    same &= (norm - second[:, 1].sqrt()).abs() <= tolerances / NORM_IS_STEADIER * norm
    moved = ~same & judged
    differing = {block for block, row in zip(blocks, moved.any(1).tolist(), strict=True) if row}
    return [block in differing for block in range(len(before))]


def gradient_of(part: Contribution) -> Tensor:
    """Return what a layer left of its gradient: that of positions, or per-sample gradients."""
    return part.saved[-1] if part.saved else part.materialise()


# -- passes ------------------------------------------------------------------------------------------------------------


class BlockInput(NamedTuple):
    """Arguments of a block, tensors without their history, and every other state that its forward depends on."""

    leaves: list[Any]
    spec: Any
    versions: list[int | None]
    own_bytes: int  # of tensors that were computed from parameters: others may be every block's (masks, positions)
    random: RandomStates
    autocast: list[tuple[str, bool, torch.dtype]]
    default_device: torch.device

    @classmethod
    def of(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], devices: Sequence[torch.device], *, numpy_state: bool
    ) -> BlockInput:
        """Take a snapshot; `numpy_state`: include NumPy's random state."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        own_bytes = bytes_of(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad)
        leaves = [held(leaf.detach()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        kinds = dict.fromkeys(["cpu", *(device.type for device in devices)])
        return cls(
            leaves,
            spec,
            _versions(leaves),
            own_bytes,
            RandomStates.now(devices, numpy_state=numpy_state),
            [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds],
            torch.get_default_device(),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore autocast and default device inside the context. Set random states, too, which the caller resets."""
        self.random.put_back()
        with ExitStack() as stack:
            if torch.get_default_device() != self.default_device:
                stack.enter_context(self.default_device)
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype if enabled else None))
            yield


@dataclass(eq=False)
class BlockPass:
    """One backward pass through a block whose layers' gradients are not held.

    `gathered` holds them until the block's norms are taken, which is when backward leaves the block. If it is `summed`
    then, it runs again only if it `keeps_boundary` and one of its parameters turns out to be used elsewhere, too.

    products: number of layer products that torch computed when it ran the block for this pass. A checkpoint stops at
    the last tensor that backward reads, so nothing reads the value of a later product.
    """

    index: int
    function: Callable[..., Any]
    places: list[int]  # of the outputs that have gradients, among the leaves of what the block gives back
    grads: Sequence[Tensor | None]
    summed: bool = False
    keeps_boundary: bool = True
    input: BlockInput | None = None
    products: int = 0
    is_open: bool = True  # until backward leaves the block
    gathered: dict[Slot, list[Contribution]] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    norms: Tensor | None = None  # (G, B) squared, once they are taken
    groups: Sequence[int] | None = None  # whose norms these are; None: all
    shape: Any = None  # of its samples: see `BlockChoices.is_held`
    sums: list[SumBatch] = field(default_factory=list)  # if it is summed
    sensitivity: float = 0.0  # of these sums
    fingerprint: Fingerprint | None = None
    activations: int = 0  # bytes that its forward adds to what is live

    def __post_init__(self) -> None:
        self.module = module_of(self.function)
        self.grads = [None if grad is None else held(grad) for grad in (self.grads if self.keeps_boundary else ())]
        self.versions = _versions(self.grads)
        self.is_measured = not self.summed  # how much it takes is to be found

    def close(self, norms: Tensor, groups: Sequence[int] | None = None) -> None:
        """Store the norms, of all groups or of some, and release the contributions of the layers."""
        self.slots, self.gathered = list(self.gathered), {}
        self.norms, self.groups = norms, groups

    @property
    def batch_size(self) -> int:
        assert self.norms is not None
        return self.norms.shape[1]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes in which the block computes, judged by its boundary and autocast."""
        assert self.input is not None
        autocast = {dtype for _, enabled, dtype in self.input.autocast if enabled}
        return autocast | {tensor.dtype for tensor in self.boundary if tensor.is_floating_point()}

    @property
    def boundary(self) -> list[Tensor]:
        """Its input and the gradients of its outputs."""
        leaves = () if self.input is None else self.input.leaves
        return [each for each in (*leaves, *self.grads) if isinstance(each, Tensor)]

    def run_again(self, anchor: Tensor, name: str) -> None:
        """Run the block forward and backward again: its layers give the engine their contributions once more."""
        assert self.input is not None
        if _versions(self.grads) != self.versions or _versions(self.input.leaves) != self.input.versions:
            raise UserError(
                f"the input or output gradient of the checkpointed block {name} was changed in place between "
                "backward and the optimizer step, which runs it again; copy the batch into fresh tensors "
                "(docs/sharp-edges.md#changes-between-backward-and-step)"
            )
        args, kwargs = pytree.tree_unflatten(self.input.leaves, self.input.spec)
        with torch.enable_grad():
            with self.input.restored():
                outputs = pytree.tree_leaves(self.function(*args, **kwargs))
            pairs = [(outputs[at], g) for at, g in zip(self.places, self.grads, strict=True) if g is not None]
        del outputs, args, kwargs
        self.input, self.grads = None, []  # what backward does not need of them is free
        roots, grads = [root for root, _ in pairs if root.requires_grad], [g for r, g in pairs if r.requires_grad]
        del pairs
        # Only what leads to the anchor: tensors that the block takes from elsewhere have a history of their own.
        torch.autograd.backward(roots, grads, inputs=[anchor])


def module_of(function: Any) -> nn.Module | None:
    """Return the module that a checkpoint runs: itself, its method, or a partial call of either."""
    while isinstance(function, partial):
        function = function.func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _versions(leaves: Sequence[Any]) -> list[int | None]:
    return [leaf._version if isinstance(leaf, Tensor) else None for leaf in leaves]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
