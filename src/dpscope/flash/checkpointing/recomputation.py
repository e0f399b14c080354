"""One backward pass through a checkpointed block, from which the block can be run once more.

It keeps the block's input, the gradients of its outputs, and every other state that a forward depends on (random
numbers, autocast). Run again from there, every layer of the block sees the x and g that it saw in the backward pass:
the same operations on the same values. So its gradients need not be held until the factors are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpscope.errors import UserError
from dpscope.flash.checkpointing.block_fingerprints import Fingerprint, gradient_of
from dpscope.flash.gradients.contributions import Contribution, held
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.step.microbatch import SumBatch
from dpscope.flash.taps.block_tails import Tail
from dpscope.random_states import RandomStates


class ForwardState(NamedTuple):
    """Random states, autocast and the default device at the beginning of a forward."""

    random: RandomStates
    autocast: list[tuple[str, bool, torch.dtype]]
    default_device: torch.device

    @classmethod
    def now(cls, devices: Sequence[torch.device], *, numpy_state: bool = True) -> ForwardState:
        """Take a snapshot; `numpy_state`: include NumPy's random state."""
        kinds = dict.fromkeys(["cpu", *(device.type for device in devices)])
        return cls(
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


class BlockInput(NamedTuple):
    """Arguments of a block: tensors without their history, and their versions."""

    leaves: list[Any]
    spec: Any
    versions: list[int | None]
    state: ForwardState
    own_bytes: int  # of tensors that were computed from parameters: others may be every block's (masks, positions)

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], state: ForwardState) -> BlockInput:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        own_bytes = bytes_of(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad)
        leaves = [held(leaf.detach()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return cls(leaves, spec, _versions(leaves), state, own_bytes)


class BlockPass:
    """One backward pass through a block whose layers' gradients are not held.

    `gathered` holds them until the block's norms are taken, which is when backward leaves the block. If it is `summed`
    then, it runs again only if it `keeps_boundary` and one of its parameters turns out to be used elsewhere, too.
    """

    def __init__(
        self,
        index: int,
        function: Callable[..., Any],
        places: list[int],
        grads: Any,
        *,
        summed: bool = False,
        keeps_boundary: bool = True,
    ) -> None:
        self.summed, self.keeps_boundary = summed, keeps_boundary
        self.index = index
        self.function = function
        self.module = module_of(function)
        self.places = places  # of the outputs that have gradients, among the leaves of what the block gives back
        self.grads: list[Tensor | None] = [None if g is None else held(g) for g in (grads if keeps_boundary else ())]
        self.versions = _versions(self.grads)
        self.shapes = [None if grad is None else grad.shape[1:] for grad in grads]
        self.input: BlockInput | None = None
        self.is_open = True  # until backward leaves the block
        self.gathered: dict[Slot, list[Contribution]] = {}
        self.slots: list[Slot] = []
        self.norms: Tensor | None = None  # (G, B) squared, once they are taken
        self.groups: Sequence[int] | None = None  # whose norms these are; None: all
        self.shape: Any = None  # of its samples: see `BlockChoices.is_held`
        self.sums: list[SumBatch] = []  # if it is summed
        self.sensitivity = 0.0  # of these sums
        self.fingerprint: Fingerprint | None = None
        self.is_measured = not summed  # how much it takes is to be found
        self.activations = 0  # bytes that its forward adds to what is live

    def close(self, norms: Tensor, groups: Sequence[int] | None = None) -> None:
        """Store the norms, of all groups or of some, and release the contributions of the layers."""
        self.slots, self.gathered = list(self.gathered), {}
        self.norms, self.groups = norms, groups

    @property
    def batch_size(self) -> int:
        assert self.norms is not None
        return self.norms.shape[1]

    @property
    def is_normed(self) -> bool:
        return self.norms is not None

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes in which the block computes, judged by its boundary and autocast."""
        assert self.input is not None
        tensors = [each for each in (*self.grads, *self.input.leaves) if isinstance(each, Tensor)]
        autocast = {dtype for _, enabled, dtype in self.input.state.autocast if enabled}
        return autocast | {tensor.dtype for tensor in tensors if tensor.is_floating_point()}

    @property
    def input_bytes(self) -> int:
        return bytes_of(leaf for leaf in (self.input.leaves if self.input else ()) if isinstance(leaf, Tensor))

    @property
    def grad_bytes(self) -> int:
        return bytes_of(grad for grad in self.grads if grad is not None)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gradients that its layers were given."""
        return bytes_of(gradient_of(part) for parts in self.gathered.values() for part in parts)

    @property
    def bytes_if_saved(self) -> int:
        """Bytes of the layers' contributions if the block were held without kept gradients: x and g."""
        return bytes_of(tensor for parts in self.gathered.values() for part in parts for tensor in _tensors(part))

    @property
    def bytes_if_kept(self) -> int:
        """Bytes of the layers' contributions if the block were held and each layer kept x and g, or its gradients."""
        kept, others = 0.0, []
        for part in (part for parts in self.gathered.values() for part in parts):
            if part.decision is not None and part.decision.kept_if_held is not None:
                kept += part.decision.kept_if_held
            else:
                others.append(part)
        return int(kept) + bytes_of(tensor for part in others for tensor in _tensors(part))

    def run_again(self, anchor: Tensor, name: str, tail: Tail) -> None:
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
            with self.input.state.restored():
                outputs = pytree.tree_leaves(self.function(*args, **kwargs))
            pairs = [(outputs[at], g) for at, g in zip(self.places, self.grads, strict=True) if g is not None]
        del outputs, args, kwargs
        self.input, self.grads = None, []  # what backward does not need of them is free
        roots, grads = [root for root, _ in pairs if root.requires_grad], [g for r, g in pairs if r.requires_grad]
        del pairs
        tail.note_outputs(roots)
        # Only what leads to the anchor: tensors that the block takes from elsewhere have a history of their own.
        torch.autograd.backward(roots, grads, inputs=[anchor])


def module_of(function: Any) -> nn.Module | None:
    """Return the module that a checkpoint runs: itself, its method, or a partial call of either."""
    while isinstance(function, partial):
        function = function.func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _tensors(part: Contribution) -> tuple[Tensor, ...]:
    return part.saved or (part.materialise(),)


def _versions(leaves: Sequence[Any]) -> list[int | None]:
    return [leaf._version if isinstance(leaf, Tensor) else None for leaf in leaves]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
