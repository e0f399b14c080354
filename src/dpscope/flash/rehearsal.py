"""A rehearsal of a forward pass: which rows of which layer belong to which sample, determined by running it.

The first time the model is called in some way, its forward runs a few times more, without gradients, random numbers
and buffers put back each time:

1. as it is;
2. with one sample replaced by another, and, in the same row, the output of every layer changed (for the first sample,
   then for the last). In the inputs of all layers and in the model's output only the row of that sample may be another
   than in the first run. So positions that have the size of the batch by chance, a batch in another dimension, and
   samples that mix are found, whatever the sizes;
3. for layers whose input is the same whatever the samples are, with one sample more: there must be one row more;
4. with the outputs of all layers changed, the second once more: what a layer that gives zeros (a gate that is closed
   at first) keeps from sight is seen then. An output without the batch's size must not join samples either;
5. for layers whose input has a single row, shared by all samples and expanded here, with that layer's output alone
   changed: it must show, and only in the row of that sample.

It costs a few forward passes once, and nothing afterwards. `known` and `shared` of a tap remember the result, by the
number of dimensions of x.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash.arguments import KEEP_BATCH_FIRST, Leaf, leaves_in, replace_leaves, rows_of, take
from dpscope.flash.rehearsal_run import EVERY_OUTPUT, Key, OutputOf, Run, Sampled, SeenTensor, untouched
from dpscope.flash.stand_in import NotFollowed

_ADVICE = (
    "Flash clipping needs the batch as the first dimension of every layer's input, samples unmixed; positions and "
    "tables that all samples share go in with a leading dimension of 1 (ids.unsqueeze(0)). Where the model's first "
    "argument is not what has a row for each sample, give batch_size_of"
)

# How far other rows may move, of the largest element: another kernel may be chosen for another batch (a mask that has
# become all ones), which rounds differently.
_ROW_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_ROW_TOLERANCE = 5e-2


class RootCall(NamedTuple):
    """A call of the model's forward with `batch` samples. `compiled`: what is really called, if not the forward."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: int
    compiled: Callable[..., Any] | None = None


class Rehearsal:
    """The rehearsal of one call.

    rehearsing  a context in which taps tell a run what they are given
    in_any_dim  whether an argument may have its samples in another dimension than the first
    """

    def __init__(
        self,
        call: RootCall,
        model: nn.Module,
        rehearsing: Callable[[Run], AbstractContextManager[None]],
        *,
        in_any_dim: bool,
    ) -> None:
        self.model = model
        self.rehearsing = rehearsing
        self.in_any_dim = in_any_dim
        self.forward, self.batch = call.forward, call.batch
        self.call = call.args, call.kwargs
        self.row = 0  # the sample that is changed
        self.shifted = False  # whether the runs are with the outputs of all layers changed
        self.sampled: dict[int, int] = {}  # arguments that hold a row for each sample: their id -> dimension
        self._content: Run | None = None

    def _sampled_leaves(self) -> dict[int, int]:
        found = {id(leaf): 0 for leaf in leaves_in(self.call) if rows_of(leaf) == self.batch}
        if not found and self.in_any_dim:
            tensors = [leaf for leaf in leaves_in(self.call) if isinstance(leaf, Tensor) and self.batch in leaf.shape]
            found = {id(leaf): leaf.shape.index(self.batch) for leaf in tensors}
        return found

    # -- running -----------------------------------------------------------------------------------------------------

    def _run(self, run: Run, index: list[int] | None = None, *, altered: bool = False) -> Run:
        """The forward on the samples `index` (None: all, in order); `altered`: on others, made of them."""
        run.shifted = self.shifted
        rows = torch.tensor(range(self.batch) if index is None else index)

        def chosen(leaf: Leaf) -> Leaf:
            if id(leaf) in self.sampled:
                leaf = take(leaf, rows, self.sampled[id(leaf)])
                return _altered(leaf) if altered and isinstance(leaf, Tensor) else leaf
            return leaf.clone() if isinstance(leaf, Tensor) else leaf

        args, kwargs = replace_leaves(self.call, chosen)
        with self.rehearsing(run), torch.no_grad(), untouched(self.model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = self.forward(*args, **kwargs)
        for leaf in leaves_in(output):
            if isinstance(leaf, Tensor):
                run.see(None, leaf, tuple(range(leaf.dim())))
        return run

    def run_with_others(self) -> None:
        """Run forward as it is, and with the first and the last sample (or the only one) replaced."""
        self.sampled = self._sampled_leaves()
        self._run(Run(self.batch))
        if self.batch == 1:
            self._run(Run(1), altered=True)
            return
        for row in (0, self.batch - 1):
            self.row = row
            self._run(Run(self.batch), self._replaced())

    def _replaced(self) -> list[int]:
        """Indices of samples, that of `row` replaced by its neighbour."""
        index = list(range(self.batch))
        index[self.row] = 1 if self.row == 0 else self.row - 1
        return index

    # -- judging -----------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Note what is known of every layer that was reached; raise UserError where rows are not samples."""
        sampled = self._sampled_leaves()
        # An argument may be shared by all samples and have as many rows by chance: a mask, a table.
        for hypothesis in (sampled, dict([*sampled.items()][:1])):
            self.sampled, self._content = hypothesis, None
            try:
                return self._judge()
            except UserError as error:
                refusal = error
                if len(sampled) < 2:
                    break
        self.sampled, self._content = sampled, None
        raise refusal

    def _judge(self) -> None:
        plain = self._first_run()
        for key in _inputs(plain):
            if not plain.seen[key].dims and not plain.seen[key].shared:
                raise UserError(f"{self._given(key[0], plain)}: {KEEP_BATCH_FIRST}")
        moved: set[Key] = set()
        for row in (0, self.batch - 1):
            self.row, self._content = row, None
            changed = self._run(Run(self.batch, row), self._replaced())
            wrong = self._wrong_rows(plain, changed)
            if wrong:
                self._refuse_mixing(plain, wrong[0])
            self._check_constants(plain, changed)
            moved |= {key for key, parts in self._moved(plain, changed).items() if any(part.any() for part in parts)}
        self._check_behind_gates()
        self._check_outputs(plain)
        if self.sampled:
            self._check_constant([key for key in _inputs(plain) if key not in moved], plain)
        self._check_shared(plain)
        for tap, _ in plain.constants:
            tap.known.add(0)
        for key in _inputs(plain):
            seen = plain.seen[key]
            (key[0].shared if seen.shared else key[0].known).add(len(seen.shape))

    def _check_constants(self, plain: Run, changed: Run) -> None:
        """What bare parameters were put together with, outside of uses, must not depend on the samples."""
        for key, before in plain.constants.items():
            after = changed.constants.get(key)
            if after is None or not torch.equal(before, after):
                raise NotFollowed([key[0].module], "a parameter is put together with samples, but not row by row")

    def _check_behind_gates(self) -> None:
        """Repeat with the outputs of all layers changed: a layer that gives zeros hides what it multiplies."""
        self.row, self.shifted, self._content = 0, True, None
        try:
            plain = self._run(Run(self.batch))
            wrong = self._wrong_rows(plain, self._run(Run(self.batch, 0), self._replaced()))
            if wrong:
                self._refuse_mixing(plain, wrong[0])
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception:  # values that no training would give
            return
        finally:
            self.shifted, self._content = False, None

    def _check_outputs(self, plain: Run) -> None:
        """An output in which no dimension has the size of the batch: no part of it may be made of two samples.

        A list of samples is found so, whose first one has rows that are no samples.
        """
        sizes = [size for (tap, _), seen in plain.seen.items() if tap is None for size in seen.shape]
        if not sizes or any(size % self.batch == 0 for size in sizes):
            return
        runs = [self._run_whole(None), self._run_whole(0), self._run_whole(self.batch - 1)]
        if len({tuple(each.shape for each in run) for run in runs}) > 1:
            return
        for before, first, last in zip(*runs, strict=True):
            if not any(_apart(before, first, last, dim) for dim in range(before.dim())):
                raise UserError(
                    f"the model was taken to be called with {self.batch} samples, but gives a tensor of shape "
                    f"{tuple(before.shape)}, each part of which depends on several of them: its samples are not the "
                    f"rows of its first argument (is it a list of samples?), or they mix. {_ADVICE}"
                )

    def _run_whole(self, row: int | None) -> list[Tensor]:
        """The real outputs with at least one dimension, sample `row` replaced."""
        if row is not None:
            self.row = row
        run = Run(self.batch, keep=EVERY_OUTPUT)
        self._run(run, None if row is None else self._replaced())
        values = [seen.value for (tap, _), seen in run.seen.items() if tap is None and seen.shape]
        return [value for value in values if value is not None and value.is_floating_point()]

    def _first_run(self) -> Run:
        run = Run(self.batch)
        try:
            self._run(run)
        except UserError:
            raise
        except Exception:
            shared = next((tap for (tap, _), seen in run.seen.items() if seen.shared), None)
            if shared is None:
                raise
            self._run(Run(self.batch, expand=False))  # an error of the model's own is the user's
            self._refuse_shared(shared)
        return run

    def _moved(self, plain: Run, other: Run) -> dict[Key, list[Tensor]]:
        """For each tensor and each dimension that may hold samples: which rows are not the same, (B,) on the CPU."""
        both = [key for key, seen in plain.seen.items() if key in other.seen and seen.shape == other.seen[key].shape]
        flags = {
            key: [
                (mine != theirs).any(1)
                for mine, theirs in zip(plain.seen[key].prints, other.seen[key].prints, strict=True)
            ]
            for key in both
        }
        return {key: [flag.cpu() for flag in parts] for key, parts in flags.items()}

    def _others(self, flag: Tensor) -> bool:
        return bool(flag[: self.row].any() or flag[self.row + 1 :].any())

    def _wrong_rows(self, plain: Run, other: Run) -> list[Key]:
        """Tensors in which rows of samples that were left alone have moved, by more than rounding."""
        suspects = self._suspects(plain, other)
        if not suspects:
            return []
        keep = frozenset(suspects)
        index = None if other.only is not None else self._replaced()
        before = self._run(Run(self.batch, keep=keep)).seen
        after = self._run(Run(self.batch, other.row, only=other.only, keep=keep), index).seen
        return [key for key, dims in suspects.items() if self._differs(before.get(key), after.get(key), dims)]

    def _suspects(self, plain: Run, other: Run) -> dict[Key, list[int]]:
        """Tensors in which other rows are not the same bit for bit, with the dimensions that may hold the samples."""
        found = {}
        for key, parts in self._moved(plain, other).items():
            flags = dict(zip(plain.seen[key].dims, parts, strict=True))
            if len(flags) > 1 and other is not self.content():  # an output with several dimensions of the batch's size
                content = self._moved(plain, self.content()).get(key, [])
                apart = [dim for dim, flag in zip(flags, content, strict=False) if not self._others(flag)]
                flags = {dim: flags[dim] for dim in apart} or flags
            if flags and all(self._others(flag) for flag in flags.values()):
                found[key] = list(flags)
        return found

    def content(self) -> Run:
        """A run in which samples were replaced, and nothing else was changed."""
        if self._content is None:
            self._content = self._run(Run(self.batch, self.row, only=self), self._replaced())
        return self._content

    def _differs(self, before: SeenTensor | None, after: SeenTensor | None, dims: list[int]) -> bool:
        if before is None or after is None or before.shape != after.shape:
            return False
        assert before.value is not None
        assert after.value is not None
        others = [row for row in range(self.batch) if row != self.row]
        index = torch.tensor(others, device=before.value.device)
        for dim in dims:
            a, b = (value.index_select(dim, index) for value in (before.value, after.value))
            if not a.is_floating_point():
                if torch.equal(a, b):
                    return False
                continue
            tolerance = _ROW_TOLERANCE.get(a.dtype, _HALF_ROW_TOLERANCE) * float(a.abs().nan_to_num(0).amax())
            if bool(((a - b).abs() <= tolerance).logical_or(a.isnan() & b.isnan()).all()):
                return False
        return True

    def _check_constant(self, keys: list[Key], plain: Run) -> None:
        """Inputs that are the same whatever the samples are: they have one row more where there is one sample more."""
        keys = [key for key in keys if not plain.seen[key].shared]
        if not keys:
            return
        try:
            larger = self._run(Run(self.batch + 1), [*range(self.batch), 0])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise self._refusal_of_constant(keys[0], plain, f"with one sample more, forward fails: {error}") from error
        for key in keys:
            seen = larger.seen.get(key)
            if seen is None or not seen.dims:
                raise self._refusal_of_constant(key, plain, "with one sample more it has as many")

    def _check_shared(self, plain: Run) -> None:
        taps = list(dict.fromkeys(key[0] for key in _inputs(plain) if plain.seen[key].shared))
        if not taps:
            return
        as_it_is = self._run(Run(self.batch, expand=False))
        outputs = [[seen.shape for (tap, _), seen in run.seen.items() if tap is None] for run in (plain, as_it_is)]
        for tap in taps:
            alone = self._run(Run(self.batch, self.row, only=tap))
            moved = [flag for parts in self._moved(plain, alone).values() for flag in parts]
            if outputs[0] != outputs[1] or not any(flag.any() for flag in moved) or self._wrong_rows(plain, alone):
                self._refuse_shared(tap)

    # -- refusing ----------------------------------------------------------------------------------------------------

    def _given(self, tap: Sampled, plain: Run) -> str:
        shape = next(seen.shape for (each, _), seen in plain.seen.items() if each is tap)
        turned = " (made with batch_first=False)" if getattr(tap.module, "batch_first", True) is False else ""
        return f"{tap.name}{turned} was given a tensor of shape {shape} in a batch of {self.batch} samples"

    def _refuse_mixing(self, plain: Run, key: Key) -> None:
        """Name the first layer whose rows are certain not to be the samples."""
        wrong = list(self._suspects(plain, self.content()))
        taps = [] if wrong else dict.fromkeys(tap for tap, _ in _inputs(plain))
        for tap in taps:
            if self._wrong_rows(plain, self._run(Run(self.batch, self.row, only=tap))):
                if tap.shared or any(seen.shared for (each, _), seen in plain.seen.items() if each is tap):
                    self._refuse_shared(tap)
                raise UserError(
                    f"{self._given(tap, plain)}, but a row of its output reaches other samples, too: its rows are not "
                    f"the samples. {_ADVICE}"
                )
        tap = (wrong or [key])[0][0]
        if isinstance(tap, OutputOf):
            raise UserError(
                f"{tap.unit.name} ({type(tap.unit.module).__name__}) mixes samples, so no sample has a gradient of its "
                "own: what it gives for one sample changes with the others; replace it by a module that treats samples "
                f"apart, the batch as the first dimension. {_ADVICE}"
            )
        if tap is None:
            raise UserError(
                f"in a batch of {self.batch} samples, what the model gives for one sample changes with the others: "
                f"samples mix in its forward, so no sample has a gradient of its own. {_ADVICE}"
            )
        raise UserError(
            f"{self._given(tap, plain)}, but rows of other samples change when one sample does: its rows are not the "
            f"samples, or samples were mixed before. {_ADVICE}"
        )

    def _refusal_of_constant(self, key: Key, plain: Run, why: str) -> UserError:
        return UserError(
            f"{self._given(key[0], plain)}, which does not depend on the samples, and its rows are not theirs ({why}). "
            f"{_ADVICE}"
        )

    def _refuse_shared(self, tap: Sampled) -> None:
        raise UserError(
            f"{tap.name} was given a tensor with one row for all {self.batch} samples, and its output is not simply "
            "broadcast over them: a sample's share of its gradient cannot be told; give it a row for each sample "
            "(x.expand(batch_size, ...)), so that row b is used by sample b alone"
        )


def _altered(leaf: Tensor) -> Tensor:
    """Another sample of the same shape."""
    return 2 * leaf + 1 if leaf.is_floating_point() else torch.zeros_like(leaf)


def _apart(plain: Tensor, first: Tensor, last: Tensor, dim: int) -> bool:
    """Whether no part along `dim` depends on both the first and the last sample."""
    of_first, of_last = (
        (other.nan_to_num() != plain.nan_to_num()).movedim(dim, 0).flatten(1).any(1)
        if plain.dim() > 1
        else other.nan_to_num() != plain.nan_to_num()
        for other in (first, last)
    )
    return not bool((of_first & of_last).any())


def _inputs(run: Run) -> list[Key]:
    """Keys of the inputs of layers, without those of outputs."""
    return [key for key in run.seen if not isinstance(key[0], OutputOf | None)]
