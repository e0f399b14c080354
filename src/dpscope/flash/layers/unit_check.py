"""Check that a module gives a batch what it gives its samples one by one, by running it on the batch without gradients.

The outputs differ if the batch is in another dimension, or if an argument that all samples share was split among them.
Dropout is switched off in both. Mixing is not tested here: each sample runs alone, and the model as a whole is verified
(sample_rows/mixing.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpscope.errors import UserError
from dpscope.flash.layers.per_sample import parameter_key
from dpscope.flash.layers.sample_call import SampleCall, WrittenArguments
from dpscope.flash.sample_rows.proxy import NotFollowed
from dpscope.flash.torch_side.arguments import KEEP_BATCH_FIRST
from dpscope.flash.torch_side.dropout import WithoutDropout

# How far two ways to compute the same may differ, relative to the largest value.
_ANSWER_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}  # of float64 too: some modules compute in float32 inside
_HALF_ANSWER_TOLERANCE = 0.05
_MAX_UNDECIDED = 4

Answers = list[Tensor]


class UnitCheck:
    """The check of one call."""

    def __init__(self, sample_call: SampleCall) -> None:
        self.tap = tap = sample_call.tap
        self.call = sample_call
        self.kind = f"{tap.name} ({type(tap.module).__name__})"
        self.devices = {leaf.device for leaf in sample_call.leaves if isinstance(leaf, Tensor) and leaf.is_cuda}

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Run without gradients, without drawing from the global random states, and without dropout."""
        with torch.no_grad(), torch.random.fork_rng(sorted(self.devices, key=str)), WithoutDropout():
            yield

    def run(self) -> list[torch.dtype]:
        """Return the dtypes of the module's own outputs. Raise UserError if samples are not independent."""
        with self._quiet():
            own = self._own({}, self.call.leaves)
            self._compare(self._one_by_one(), own, values=self._own_is_repeatable(own))
        return [answer.dtype for answer in own]

    # -- a batch, and its samples one by one ---------------------------------------------------------------------------

    def _own(self, parameters: dict[str, Tensor], leaves: Sequence[Any]) -> Answers:
        found, _, _ = self.call.call(parameters, leaves)
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    def _own_is_repeatable(self, own: Answers) -> bool:
        before = self._random_states()
        again = self._own({}, self.call.leaves)
        drawn = any(not torch.equal(a, b) for a, b in zip(before, self._random_states(), strict=True))
        if len(again) != len(own):
            raise UserError(
                f"{self.kind} gives {len(own)} tensors, and {len(again)} when it is run again: it depends on "
                "something outside of it; ask it for its last output alone (output_hidden_states=False)"
            )
        return not drawn and all(_distance(a, b) == 0 for a, b in zip(own, again, strict=True))

    def _random_states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self.devices)]

    def _one_by_one(self) -> Answers:
        expanded = {
            parameter_key(key): parameter.detach().expand(self.call.batch, *parameter.shape)
            for key, parameter in self.tap.whole_parameters().items()
            if parameter.requires_grad
        }
        output = self.call.run(expanded, commit=False)
        return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]

    def _compare(self, found: Answers, own: Answers, *, values: bool = True) -> None:
        if len(found) != len(own):
            reason = f"{self.kind} gives {len(own)} tensors for a batch, but {len(found)} for its samples"
            raise self.tap.does_not_fit(reason)
        for mine, once in zip(found, own, strict=True):
            if not self.call.mapped and once.dim() and once.shape[0] == 1:
                once = once.expand(mine.shape)  # noqa: PLW2901 - an answer shared by all samples
            if mine.shape != once.shape:
                raise self.tap.does_not_fit(
                    f"{self.kind} gave {tuple(once.shape)} for a batch but {tuple(mine.shape)} from its samples one by "
                    f"one: {KEEP_BATCH_FIRST}"
                )
            tolerance = _ANSWER_TOLERANCE.get(once.dtype, _HALF_ANSWER_TOLERANCE)
            if torch.is_autocast_enabled(once.device.type):  # an answer in float32 may be made of rounded products
                tolerance = max(tolerance, _HALF_ANSWER_TOLERANCE)
            if values and _distance(mine, once) > tolerance * _size(once):
                raise self.tap.does_not_fit(
                    f"{self.kind} answers differently for a batch than for its samples one by one: it mixes samples, "
                    "or has them in another dimension; replace it by a module that treats samples apart"
                )

    # -- arguments whose size is the batch's, perhaps by coincidence ---------------------------------------------------

    def decide(self) -> None:
        """Split undecided arguments among samples or share them, whichever reproduces the module's own output.

        Their values are shuffled for this, so that they matter and no two readings agree by coincidence.
        """
        call, undecided = self.call, self.call.undecided
        if len(undecided) > _MAX_UNDECIDED:
            raise self.tap.does_not_fit(
                f"{self.kind} was given {len(undecided)} tensors whose first dimension is {call.batch}, the number of "
                "samples: it cannot be told which of them are shared by all samples; give it a batch of another size"
            )
        leaves, mapped = list(call.leaves), dict(call.mapped)
        readings: list[tuple[bool, ...]] = []
        try:
            for shuffled in (True, False):
                call.leaves = [
                    _shuffled(leaf) if shuffled and i in undecided else leaf for i, leaf in enumerate(leaves)
                ]
                readings = [
                    reading for reading in product((True, False), repeat=len(undecided)) if self._fits(mapped, reading)
                ]
                if readings:
                    break
        finally:
            call.leaves, call.mapped = leaves, mapped
        if not readings:
            names = ", ".join(sorted({call.names[index] for index in undecided}))
            raise self.tap.does_not_fit(
                f"{self.kind} answers differently for a batch of {call.batch} than for its samples one by one, whether "
                f"{names} is taken to hold one entry a sample or to be shared: {KEEP_BATCH_FIRST}"
            )
        for position, index in enumerate(undecided):
            meanings = {reading[position] for reading in readings}
            if not readings[0][position]:
                del call.mapped[index]
            if len(meanings) == 1:
                self.tap.per_sample[call.key(index)] = readings[0][position]
        call.undecided = []

    def _fits(self, mapped: dict[int, int], reading: tuple[bool, ...]) -> bool:
        chosen = dict(zip(self.call.undecided, reading, strict=True))
        self.call.mapped = {index: dim for index, dim in mapped.items() if chosen.get(index, True)}
        with self._quiet():
            try:
                own = self._own({}, self.call.leaves)
                self._compare(self._one_by_one(), own)
            except WrittenArguments:
                raise
            except (Exception, NotFollowed):  # a reading that does not fit fails in whatever way the module fails
                return False
        return True


def _shuffled(leaf: Tensor) -> Tensor:
    """Return the values in random order; change real ones as well."""
    flat = leaf.detach().flatten()
    order = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(0)).to(leaf.device)
    flat = flat[order]
    if flat.is_floating_point():
        flat = flat + torch.linspace(0.1, 1.0, flat.numel(), dtype=flat.dtype, device=flat.device)
    return flat.view(leaf.shape)


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference. Values that are not finite have to be equal."""
    if a.numel() == 0:
        return 0.0
    dtype = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.to(dtype), b.to(dtype)
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=float("inf"))).max())


def _size(answer: Tensor) -> float:
    values = answer.abs().double()
    return float(torch.where(values.isfinite(), values, 0.0).max()) if answer.numel() else 0.0
