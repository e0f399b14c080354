"""One call of the model, to be tried out with other samples: which arguments hold samples, and which samples to try."""

from __future__ import annotations

import math
import random
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpscope.endings import lacks_memory
from dpscope.flash.sample_rows.proxy import RanOutOfMemory
from dpscope.flash.sample_rows.snapshots import ModelSnapshot, all_zero, filled
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.arguments import ArgumentPlace, Leaf, leaves_in, numbers_in, replace_leaves, rows_of, take
from dpscope.flash.torch_side.frames import eagerly
from dpscope.random_states import cuda_devices, seed_all

PUT_BATCH_FIRST = (
    "Put the batch first in every layer's input, and shared tables with a leading dimension of 1 (ids.unsqueeze(0)). "
    "If the model's first argument has no row for each sample, give batch_size_of"
)

MOST_SHARE = 4
"""Of the batch, a quarter is looked at where all of it need not be."""
MOST_ROWS = 32
"""Samples that are looked at, about."""
LOUD = 16.0
"""Factor of a sample that replaces another: one that only takes part if it is the largest is heard."""
RANDOM = random.Random()


class RootCall(NamedTuple):
    """A call of the model's forward with `batch` samples. `instead`: what is really called, if not the forward."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: int
    instead: Callable[..., Any] | None = None


class TriedCall:
    """A call that the untouched model runs on chosen samples, with gradients as in training, of which nothing is left.

    alone       gives a context in which the model runs without taps, and without other processes
    gates       parameters that are set to other values where they are zero
    in_any_dim  whether an argument may have its samples in another dimension than the first
    shared      places of tensors, among the call's, that have as many rows as there are samples by chance
    """

    def __init__(
        self,
        call: RootCall,
        model: nn.Module,
        alone: Callable[[], AbstractContextManager[None]],
        *,
        gates: Collection[nn.Parameter],
        in_any_dim: bool,
        shared: frozenset[int] = frozenset(),
    ) -> None:
        self.gates = gates
        self.model, self.alone, self.devices = model, alone, cuda_devices(model)
        self.shared = shared
        self.in_any_dim = in_any_dim
        self.batch = call.batch
        self.call = call.args, call.kwargs
        self.sampled = self.sampled_leaves()  # arguments that hold a row for each sample: their id -> dimension
        self.told: frozenset[ArgumentPlace] = frozenset()  # of numbers among the arguments that are that of the samples
        self.wide = False  # whether it runs in float64
        self.may_repeat = False  # whether there may be more rows than samples, which takes more memory than a step
        self.snapshot: ModelSnapshot | None = None
        self._has_run = False
        self._closed: list[nn.Parameter] | None = None  # gates that are zero, once they were looked at
        self.across: Tensor | None = None  # an order of samples for further dimensions that have as many entries

    @contextmanager
    def untouched(self, *, attributes: bool = True) -> Iterator[None]:
        """Leave the model, and all random states, as they were before the first question.

        Without `attributes`, what modules keep stays.
        """
        self.snapshot = self.snapshot or ModelSnapshot(self.model, self.devices)
        try:
            with self.snapshot.kept(attributes=attributes):
                yield
        except BaseException as error:
            # Up to 2.12 torch leaves the hooks of a checkpoint that fails in place for as long as its frames live.
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, Exception) and lacks_memory(error):
                raise RanOutOfMemory(error) from error
            raise

    def opened_gates(self) -> AbstractContextManager[None]:
        """Fill parameters that are zero inside the block: a closed gate, or LoRA's B, would hide what it multiplies."""
        if self._closed is None:
            self._closed = all_zero(self.gates)
        return filled(self._closed)

    def watched(self) -> AbstractContextManager[object]:
        """Return a context for a run, which notes what the first one writes: all runs put it back."""
        if self._has_run or self.snapshot is None or dry_run.current() is not None:
            return nullcontext()
        self._has_run = True
        return self.snapshot.written

    def numbers(self, rows: int) -> dict[ArgumentPlace, int]:
        """Return what numbers among the arguments become if there are so many rows."""
        return dict.fromkeys(self.told, rows)

    def rows(self) -> list[int]:
        """Return some of the samples: about a quarter and at most about 32, or all where an argument relates them.

        Their number is a prime that divides no other size of the arguments, so that positions, or anything else, do
        not come in as many rows, or multiples of it, by chance. Some are taken twice for that if they `may_repeat`.
        """
        sampled = self.sampled_leaves()
        leaves = [leaf for leaf in leaves_in(self.call) if isinstance(leaf, Tensor)]
        sizes = [size for leaf in leaves for size in _without(leaf.shape, sampled.get(id(leaf)))]
        if self.told:  # other numbers are told from it
            others = (number for place, number in numbers_in(self.call) if place not in self.told)
            sizes += [number for number in others if isinstance(number, int) and number > 1]
        # A size that may have to do with the number of samples: an argument may relate those of another one.
        if not sampled or (self.batch in sizes and len(sampled) > 1):
            return list(range(self.batch))
        least = min(self.batch, max(3, self.batch // MOST_SHARE), MOST_ROWS)
        most = 2 * self.batch + 1 if self.may_repeat else self.batch
        counts = (count for count in (*range(least, 2, -1), *range(least + 1, most + 1)) if _is_prime(count))
        count = next((count for count in counts if all(size % count for size in sizes)), least)
        again = RANDOM.choices(range(self.batch), k=max(0, count - self.batch))
        return sorted((*RANDOM.sample(range(self.batch), min(count, self.batch)), *again))

    def sampled_leaves(self) -> dict[int, int]:
        """Return the arguments that hold a row for each sample: their id -> dimension."""
        leaves = [leaf for place, leaf in enumerate(leaves_in(self.call)) if place not in self.shared]
        found = {id(leaf): 0 for leaf in leaves if rows_of(leaf) == self.batch}
        if found or not self.in_any_dim:
            return found
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and self.batch in leaf.shape]
        return {id(leaf): leaf.shape.index(self.batch) for leaf in tensors}

    def readings(self, *, of_any_shape: bool = False) -> Iterator[None]:
        """Try values of `shared` in turn: no argument, one, or all but the first (masks, tables).

        Those that look like rows of samples are left out, unless they may be `of_any_shape`.
        """
        sampled = self.sampled_leaves()
        leaves = [(place, leaf) for place, leaf in enumerate(leaves_in(self.call)) if id(leaf) in sampled]
        places = [place for place, leaf in leaves[1:] if of_any_shape or self._may_be_shared(leaf, leaves[0][1])]
        given = self.shared
        for more in dict.fromkeys([frozenset[int](), *(frozenset([place]) for place in places), frozenset(places)]):
            self.shared = given | more
            self.sampled = self.sampled_leaves()
            yield
        self.shared, self.sampled = given, sampled

    def _may_be_shared(self, leaf: Leaf, first: Leaf) -> bool:
        """Return whether an argument may have as many rows as there are samples by chance.

        A table may. What has a row for each sample and for each position of the first argument belongs to its samples.
        Numbers in one dimension are shared only if something else has that size, too: positions, channels, classes.
        """
        if not isinstance(leaf, Tensor) or not isinstance(first, Tensor):
            return False
        if leaf.dim() > 1:
            return leaf.shape[:2] != first.shape[:2] or leaf.shape[1] == self.batch
        given = [each.shape[1:] for each in leaves_in(self.call) if isinstance(each, Tensor)]
        own = [each.shape for each in (*self.model.parameters(), *self.model.buffers())]
        return any(self.batch in shape for shape in (*given, *own))

    def _altered(self, leaf: Tensor, dim: int, places: Sequence[int]) -> Tensor:
        """Give samples other values, of the other sign: what a model keeps may be the sign of their mean.

        Ids and lengths of several samples stay: another sample has others.
        """
        if not places or (self.batch > 1 and not leaf.is_floating_point()):
            return leaf
        those = torch.tensor(places, device=leaf.device)
        part = leaf.index_select(dim, those)
        other = torch.where(part == 0, 1.0, -2.0 * part) if leaf.is_floating_point() else torch.zeros_like(part)
        return leaf.index_copy(dim, those, other)

    def run_on(
        self,
        index: list[int] | None,
        *,
        altered: Sequence[int] = (),
        loud: int | None = None,
        seed: int | None = None,
    ) -> Any:
        """Run the model's forward on the samples `index` (None: all, in order); return its output.

        altered  which of these samples have other values than theirs
        loud     which of them is multiplied by a large number
        seed     of the random numbers that it draws; None: those of the step
        """
        rows = torch.tensor(range(self.batch) if index is None else index)

        def chosen(leaf: Leaf) -> Leaf:
            if id(leaf) in self.sampled:
                place = self.sampled[id(leaf)]
                leaf = take(leaf, rows, place)
                if self.across is not None and isinstance(leaf, Tensor) and leaf.dim() > 1:
                    leaf = _across(leaf, self.across, place)
                leaf = self._altered(leaf, place, altered) if isinstance(leaf, Tensor) else leaf
                if loud is not None and isinstance(leaf, Tensor) and leaf.is_floating_point():
                    leaf.select(place, loud).mul_(LOUD)
            elif isinstance(leaf, Tensor):
                leaf = leaf.clone()
            return leaf.double() if self.wide and isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

        with torch.no_grad():
            args, kwargs = replace_leaves(
                self.call, lambda leaf: given_like(leaf, chosen(leaf)), numbers=self.numbers(len(rows))
            )
        if seed is not None:
            seed_all(seed, self.devices)
        with self.alone(), self.watched(), torch.enable_grad(), warnings.catch_warnings(), eagerly():
            warnings.simplefilter("ignore")
            return self.model.forward(*args, **kwargs)


def given_like(leaf: Leaf, fresh: Leaf) -> Leaf:
    """Return a fresh tensor that has a history if the user's requires a gradient; forward may write into it."""
    if not isinstance(leaf, Tensor) or not isinstance(fresh, Tensor) or not leaf.requires_grad:
        return fresh
    with torch.enable_grad():
        return fresh.detach().requires_grad_().clone()


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _without(shape: torch.Size, dim: int | None) -> list[int]:
    return [size for axis, size in enumerate(shape) if axis != dim]


def _across(leaf: Tensor, order: Tensor, place: int) -> Tensor:
    """Return the leaf with its other dimensions of the batch's size permuted alike, as they relate samples."""
    for dim, size in enumerate(leaf.shape):
        if dim != place and size == len(order):
            leaf = leaf.index_select(dim, order.to(leaf.device).roll(1))
    return leaf
