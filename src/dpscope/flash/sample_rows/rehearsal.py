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

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash.sample_rows.rehearsal_run import (
    EVERY_OUTPUT,
    Key,
    OutputOf,
    Run,
    Sampled,
    SeenTensor,
    buffers_put_back,
    untouched,
)
from dpscope.flash.sample_rows.stand_in import NotFollowed
from dpscope.flash.torch_side.arguments import KEEP_BATCH_FIRST, Leaf, leaves_in, replace_leaves, rows_of, take
from dpscope.flash.torch_side.module_state import ModuleState
from dpscope.random_states import cuda_devices, seed_all

_ADVICE = (
    "Flash clipping needs the batch as the first dimension of every layer's input, samples unmixed; positions and "
    "tables that all samples share go in with a leading dimension of 1 (ids.unsqueeze(0)). Where the model's first "
    "argument is not what has a row for each sample, give batch_size_of"
)

MOST_SHARE = 4
"""Of the batch, a quarter is looked at where all of it need not be."""
DRAWS = 4
"""Other orders of samples, and other random numbers, that the first batch is tried with."""
SLICE = 2**22
"""Elements of outputs that are compared at a time."""
_RANDOM = random.Random()

# How far other rows may move, of the largest element: another kernel may be chosen for another batch (a mask that has
# become all ones), which rounds differently.
_ROW_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_ROW_TOLERANCE = 5e-2
_FULL_PRECISION = {torch.float32, torch.float64}


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
    shared      places of tensors, among the call's, that have as many rows as there are samples by chance
    """

    def __init__(
        self,
        call: RootCall,
        model: nn.Module,
        rehearsing: Callable[[Run], AbstractContextManager[None]],
        *,
        in_any_dim: bool,
        shared: frozenset[int] = frozenset(),
    ) -> None:
        self.model = model
        self.shared = shared
        self.rehearsing = rehearsing
        self.in_any_dim = in_any_dim
        self.forward, self.batch = call.forward, call.batch
        self.call = call.args, call.kwargs
        self.row = 0  # the sample that is changed
        self.shifted = False  # whether the runs are with the outputs of all layers changed
        self.sampled: dict[int, int] = {}  # arguments that hold a row for each sample: their id -> dimension
        self.across: Tensor | None = None  # an order of samples for further dimensions that have as many entries
        self._content: Run | None = None

    def rows(self) -> list[int]:
        """Return some of the samples, two at least: a quarter, or all if an argument relates samples to one another."""
        sampled = self.sampled_leaves()
        leaves = [leaf for leaf in leaves_in(self.call) if isinstance(leaf, Tensor)]
        # Sizes of which it cannot be told that they have nothing to do with the number of samples.
        if not sampled or any(self.batch in _without(leaf.shape, sampled.get(id(leaf))) for leaf in leaves):
            return list(range(self.batch))
        count = min(self.batch, max(2, self.batch // MOST_SHARE))
        return sorted(_RANDOM.sample(range(self.batch), count))

    def sampled_leaves(self) -> dict[int, int]:
        leaves = [leaf for place, leaf in enumerate(leaves_in(self.call)) if place not in self.shared]
        found = {id(leaf): 0 for leaf in leaves if rows_of(leaf) == self.batch}
        if found or not self.in_any_dim:
            return found
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and self.batch in leaf.shape]
        return {id(leaf): leaf.shape.index(self.batch) for leaf in tensors}

    def _readings(self) -> Iterator[None]:
        """Set `shared` to what it may be, in turn: no argument, one, or all but the first (masks, tables)."""
        sampled = self.sampled_leaves()
        places = [place for place, leaf in enumerate(leaves_in(self.call)) if id(leaf) in sampled][1:]
        given = self.shared
        for more in dict.fromkeys([frozenset[int](), *(frozenset([place]) for place in places), frozenset(places)]):
            self.shared, self._content = given | more, None
            self.sampled = self.sampled_leaves()
            yield
        self.shared, self._content, self.sampled = given, None, sampled

    def has_different_samples(self) -> bool:
        """Return whether any two samples differ: a batch of one sample many times shows nothing of several."""
        sampled = self.sampled_leaves()
        leaves = [leaf for leaf in leaves_in(self.call) if id(leaf) in sampled]
        dense = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
        plain = [leaf.movedim(sampled[id(leaf)], 0) for leaf in dense]
        # Packed and sparse ones are not looked into.
        return self.batch == 1 or len(plain) < len(leaves) or any(bool((leaf != leaf[:1]).any()) for leaf in plain)

    # -- running -----------------------------------------------------------------------------------------------------

    def _run(self, run: Run, index: list[int] | None = None, *, altered: bool = False, seed: int | None = None) -> Run:
        """Run the forward on the samples `index` (None: all, in order), and leave no trace of it.

        altered  on other samples, made of them
        seed     of the random numbers that it draws; None: those of the step
        """
        with untouched(self.model):
            return self._pass(run, index, altered=altered, seed=seed)

    def _pass(self, run: Run, index: list[int] | None, *, altered: bool = False, seed: int | None = None) -> Run:
        run.shifted = self.shifted
        rows = torch.tensor(range(self.batch) if index is None else index)

        def chosen(leaf: Leaf) -> Leaf:
            if id(leaf) in self.sampled:
                place = self.sampled[id(leaf)]
                leaf = take(leaf, rows, place)
                if self.across is not None and isinstance(leaf, Tensor) and leaf.dim() > 1:
                    leaf = _across(leaf, self.across, place)
                return _altered(leaf) if altered and isinstance(leaf, Tensor) else leaf
            return leaf.clone() if isinstance(leaf, Tensor) else leaf

        args, kwargs = replace_leaves(self.call, chosen)
        if seed is not None:
            seed_all(seed, cuda_devices(self.model))
        with self.rehearsing(run), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = self.forward(*args, **kwargs)
        for leaf in leaves_in(output):
            if isinstance(leaf, Tensor):
                run.see(None, leaf, tuple(range(leaf.dim())))
        return run

    def run_with_others(self) -> None:
        """Run forward unchanged, and with the first and the last sample (or the only one) replaced."""
        self.sampled = self.sampled_leaves()
        self._run(Run(self.batch))
        if self.batch == 1:
            self._run(Run(1), altered=True)
            return
        for row in (0, self.batch - 1):
            self.row = row
            self._run(Run(self.batch), self._replaced())

    def _replaced(self) -> list[int]:
        """Return the indices of samples, with that of `row` replaced by its neighbour's."""
        index = list(range(self.batch))
        index[self.row] = 1 if self.row == 0 else self.row - 1
        return index

    # -- looking at outputs alone --------------------------------------------------------------------------------------

    def draw_again(self) -> None:
        """Compare rows in other orders of the samples, and with other random numbers: mixing may hang on either."""
        self.sampled = self.sampled_leaves()
        for _ in range(DRAWS):
            seed, rows = _RANDOM.getrandbits(31), self.rows()
            order = _RANDOM.sample(rows, len(rows))
            self.across = torch.tensor(order) if len(order) == self.batch else None
            try:
                self._compare_rows(order, seed)
            except (UserError, NotFollowed, torch.OutOfMemoryError):
                raise
            except Exception:  # a model that asks for samples in a given order, say sorted by length
                self.across = None
                self._compare_rows(rows, seed)
            finally:
                self.across = None

    def look_again(self) -> None:
        """Compare some rows with the random numbers of the step, the first and the last of them replaced."""
        refusals: list[UserError] = []
        for _ in self._readings():
            rows = self.rows()
            try:
                self._compare_rows(rows, None, (0, len(rows) - 1))
                return
            except UserError as error:
                refusals.append(error)
        raise refusals[0]

    def _compare_rows(self, index: list[int], seed: int | None, places: Iterable[int] | None = None) -> None:
        """Refuse a model if replacing a sample, by default a random one, changes other rows of its output."""
        before = self._outputs(index, seed)
        for place in places or [_RANDOM.randrange(len(index))]:
            others = [row for row in range(self.batch) if row not in index]
            others = others or [row for row in index if row != index[place]]
            after = self._outputs([*index[:place], _RANDOM.choice(others), *index[place + 1 :]], seed)
            if [each.shape for each in before] != [each.shape for each in after]:
                return
            kept = torch.tensor([row for row in range(len(index)) if row != place])
            for first, second in zip(before, after, strict=True):
                dims = [dim for dim, size in enumerate(first.shape) if size == len(index)]
                if dims and all(_apart_from(first, second, dim, kept) for dim in dims):
                    raise self._mixing()

    def _outputs(self, index: list[int], seed: int | None) -> list[Tensor]:
        run = self._run(Run(len(index), keep=EVERY_OUTPUT), index, seed=seed)
        return [seen.value for (tap, _), seen in run.seen.items() if tap is None and seen.value is not None]

    def compare_sizes(self) -> None:
        """Refuse a model whose output for a sample depends on how many there are: one that divides by their number.

        Every row has to differ. Where random numbers are drawn they are others for fewer samples: nothing is said then.
        """
        self.sampled = self.sampled_leaves()
        rows = self.rows()
        fewer = rows[: len(rows) // 2]
        many = self._outputs(rows, 1)
        try:
            few = self._outputs(fewer, 1)
        except torch.OutOfMemoryError:
            raise
        except (Exception, NotFollowed):  # it takes no fewer
            return
        sizes = len(fewer), len(rows)
        if any(self._every_row_differs(*both, *sizes) for both in zip(few, many, strict=False)):
            again = self._outputs(rows, 2)
            if all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(many, again, strict=True)):
                raise UserError(
                    f"what the model gives for a sample depends on how many samples are in its batch ({sizes[0]} of "
                    f"{sizes[1]} alone give something else): no sample has a gradient of its own. Divide by a fixed "
                    "number, or leave the mean over samples to the loss"
                )

    def _every_row_differs(self, few: Tensor, many: Tensor, fewer: int, rows: int) -> bool:
        dims = [dim for dim, size in enumerate(many.shape) if size == rows and few.dim() > dim]
        if len(dims) != 1 or not few.is_floating_point() or not few.numel():
            return False
        a, b = (each.movedim(dims[0], 0).reshape(each.shape[dims[0]], -1) for each in (few, many))
        if len(a) != fewer or a.shape[1] != b.shape[1]:
            return False
        apart, size = (torch.linalg.vector_norm(each.float(), dim=1) for each in (a - b[:fewer], b[:fewer]))
        dtypes = {parameter.dtype for parameter in self.model.parameters()}
        if is_coarse(few) or not dtypes <= _FULL_PRECISION:
            return bool((apart > 0.1 * size).all())
        told_apart = torch.linalg.vector_norm((b[:1] - b[1:2]).float())  # what tells one sample from another
        return bool((apart > torch.maximum(1e-3 * told_apart, 1e-5 * size)).all())

    def find_carried_state(self) -> None:
        """Refuse a model that keeps something of its samples for the next step, wherever it keeps it.

        It runs on one batch and then on another. Its output for the second must not depend on the first. Buffers are
        judged elsewhere, and put back in between.
        """
        self.sampled = self.sampled_leaves()
        rows = self.rows()
        seen = []
        for altered in (False, True):
            with untouched(self.model):
                with buffers_put_back(self.model):
                    first = rows if self.batch == 1 or not altered else self._shifted(rows)
                    self._pass(Run(len(rows)), first, altered=altered and self.batch == 1, seed=1)
                run = self._pass(Run(len(rows), keep=EVERY_OUTPUT), rows, seed=2)
                seen.append([each.value for (tap, _), each in run.seen.items() if tap is None])
        whole = torch.arange(len(rows))
        for before, after in zip(*seen, strict=False):
            if before is None or after is None or before.shape != after.shape:
                continue
            dim = next((dim for dim, size in enumerate(before.shape) if size == len(rows)), None)
            if dim is not None and _apart_from(before, after, dim, whole):
                self._refuse_carried(rows)

    def _shifted(self, rows: list[int]) -> list[int]:
        """Return as many other samples; not all of them in another order, which a mean would not show."""
        others = [(row + 1) % self.batch for row in rows]
        return [others[1], *others[1:]] if len(rows) == self.batch else others

    def _refuse_carried(self, rows: list[int]) -> None:
        with untouched(self.model):
            state = ModuleState(self.model)
            self._pass(Run(len(rows)), rows, seed=1)
            names = sorted(state.take_changes())
        where = f"in {', '.join(names[:3])}" if names else "outside of its modules"
        raise UserError(
            f"the model keeps something of its samples from one step to the next ({where}): samples of one step would "
            "reach the next without noise. Reset it in forward, or detach it from training"
        )

    # -- judging -----------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Note what is known of every layer that was reached; raise UserError where rows are not samples."""
        refusals: list[BaseException] = []
        for _ in self._readings():
            try:
                self._judge()
                return
            except (UserError, NotFollowed) as error:
                refusals.append(error)
        # Other taps may fit where the model is called as one of the readings has it.
        raise next((each for each in refusals if isinstance(each, NotFollowed)), refusals[0])

    def _judge(self) -> None:
        plain = self._first_run()
        odd = [key[0] for key in _inputs(plain) if not plain.seen[key].dims and not plain.seen[key].shared]
        if odd:
            reason = f"{self._given(odd[0], plain)}: {KEEP_BATCH_FIRST}"
            raise NotFollowed(_modules_of(odd), reason)
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
        """Require that what bare parameters are combined with, outside of uses, does not depend on the samples."""
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
        """Refuse an output that has no dimension of the batch's size and whose parts depend on several samples.

        This finds a list of samples whose first one has rows that are no samples.
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
        """Return the real outputs with at least one dimension, with sample `row` replaced."""
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
            self._refuse_shared([shared])
        return run

    def _moved(self, plain: Run, other: Run) -> dict[Key, list[Tensor]]:
        """Return which rows differ, (B,) on the CPU, for each tensor and each dimension that may hold samples."""
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
        """Return tensors in which rows of other samples than the replaced one moved by more than rounding."""
        suspects = self._suspects(plain, other)
        if not suspects:
            return []
        keep = frozenset(suspects)
        index = None if other.only is not None else self._replaced()
        before = self._run(Run(self.batch, keep=keep)).seen
        after = self._run(Run(self.batch, other.row, only=other.only, keep=keep), index).seen
        return [key for key, dims in suspects.items() if self._differs(before.get(key), after.get(key), dims)]

    def _suspects(self, plain: Run, other: Run) -> dict[Key, list[int]]:
        """Return tensors in which other rows differ in any bit, with the dimensions that may hold the samples."""
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
        """Return a run in which samples were replaced, and nothing else was changed."""
        if self._content is None:
            self._content = self._run(Run(self.batch, self.row, only=self), self._replaced())
        return self._content

    def _differs(self, before: SeenTensor | None, after: SeenTensor | None, dims: list[int]) -> bool:
        if before is None or after is None or before.shape != after.shape:
            return False
        assert before.value is not None
        assert after.value is not None
        others = torch.tensor([row for row in range(self.batch) if row != self.row])
        return all(_apart_from(before.value, after.value, dim, others) for dim in dims)

    def _check_constant(self, keys: list[Key], plain: Run) -> None:
        """Refuse inputs that do not depend on the samples, unless one sample more gives them one row more."""
        keys = [key for key in keys if not plain.seen[key].shared]
        if not keys:
            return
        try:
            larger = self._run(Run(self.batch + 1), [*range(self.batch), 0])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise self._refusal_of_constant(keys[:1], plain, f"with one sample more, forward fails: {error}") from error
        odd = [key for key in keys if (seen := larger.seen.get(key)) is None or not seen.dims]
        if odd:
            raise self._refusal_of_constant(odd, plain, "with one sample more it has as many")

    def _check_shared(self, plain: Run) -> None:
        taps = list(dict.fromkeys(key[0] for key in _inputs(plain) if plain.seen[key].shared))
        if not taps:
            return
        as_it_is = self._run(Run(self.batch, expand=False))
        outputs = [[seen.shape for (tap, _), seen in run.seen.items() if tap is None] for run in (plain, as_it_is)]
        odd = []
        for tap in taps:
            alone = self._run(Run(self.batch, self.row, only=tap))
            moved = [flag for parts in self._moved(plain, alone).values() for flag in parts]
            if outputs[0] != outputs[1] or not any(flag.any() for flag in moved) or self._wrong_rows(plain, alone):
                odd.append(tap)
        if odd:
            self._refuse_shared(odd)

    # -- refusing ----------------------------------------------------------------------------------------------------

    def _given(self, tap: Sampled, plain: Run) -> str:
        shape = next(seen.shape for (each, _), seen in plain.seen.items() if each is tap)
        turned = " (made with batch_first=False)" if getattr(tap.module, "batch_first", True) is False else ""
        return f"{tap.name}{turned} was given a tensor of shape {shape} in a batch of {self.batch} samples"

    def _refuse_mixing(self, plain: Run, key: Key) -> None:
        """Refuse samples that mix; where only rows of layers are not the samples, have modules around them tapped."""
        wrong = list(self._suspects(plain, self.content()))
        if any(tap is None for tap, _ in wrong):
            raise self._mixing()
        if not wrong:
            self._refuse_reaching(plain)
        found = [tap for tap, _ in wrong or [key] if tap is not None]
        if not found:
            raise self._mixing()
        first = found[0]
        if isinstance(first, OutputOf):
            reason = f"{first.unit.name} ({type(first.unit.module).__name__}) mixes samples. {_ADVICE}"
        else:
            reason = (
                f"{self._given(first, plain)}, but rows of other samples change when one sample does: its rows are not "
                f"the samples, or samples were mixed before. {_ADVICE}"
            )
        units = [tap.unit if isinstance(tap, OutputOf) else tap for tap in found]
        raise NotFollowed(_modules_of(units), reason, climb=True)

    def _mixing(self) -> UserError:
        return UserError(
            f"in a batch of {self.batch} samples, what the model gives for one sample changes with the others: "
            f"samples mix in its forward, so no sample has a gradient of its own. {_ADVICE}"
        )

    def _refuse_reaching(self, plain: Run) -> None:
        """Find layers whose output, changed in one row, reaches other samples: their rows are not the samples.

        Those whose input has nothing of the samples are found all at once, for they are followed.
        """
        moved = self._moved(plain, self.content())
        still = {key[0] for key in _inputs(plain) if not any(flag.any() for flag in moved.get(key, ()))}
        odd: list[Sampled] = []
        for tap in dict.fromkeys(tap for tap, _ in _inputs(plain)):
            if not self._wrong_rows(plain, self._run(Run(self.batch, self.row, only=tap))):
                continue
            if tap not in still and not odd:
                reason = f"{self._given(tap, plain)}, but a row of its output reaches other samples, too: its rows are "
                raise NotFollowed([tap.module], f"{reason}not the samples. {_ADVICE}", climb=True)
            if tap in still:
                odd.append(tap)
        if odd:
            reason = f"{self._given(odd[0], plain)}, which has nothing of the samples. {_ADVICE}"
            raise NotFollowed(_modules_of(odd), reason)

    def _refusal_of_constant(self, keys: list[Key], plain: Run, why: str) -> NotFollowed:
        reason = f"{self._given(keys[0][0], plain)}, which does not depend on the samples ({why}). {_ADVICE}"
        return NotFollowed(_modules_of([tap for tap, _ in keys]), reason)

    def _refuse_shared(self, taps: list[Sampled]) -> None:
        raise NotFollowed(
            _modules_of(taps),
            f"{taps[0].name} was given a tensor with one row for all {self.batch} samples, and its output is not "
            "simply broadcast over them. Give it a row for each sample (x.expand(batch_size, ...))",
        )


def _modules_of(taps: Iterable[Sampled]) -> list[nn.Module]:
    return list(dict.fromkeys(tap.module for tap in taps))


def _without(shape: torch.Size, dim: int | None) -> list[int]:
    return [size for axis, size in enumerate(shape) if axis != dim]


def _across(leaf: Tensor, order: Tensor, place: int) -> Tensor:
    """Permute the leaf's other dimensions of the batch's size, which relate samples to one another."""
    for dim, size in enumerate(leaf.shape):
        if dim != place and size == len(order):
            leaf = leaf.index_select(dim, order.to(leaf.device).roll(1))
    return leaf


def _apart_from(a: Tensor, b: Tensor, dim: int, rows: Tensor) -> bool:
    """Return whether these rows differ by more than rounding."""
    if not a.is_floating_point():
        return any(not torch.equal(x, y) for x, y in zip(slices(a, dim, rows), slices(b, dim, rows), strict=True))
    largest = max((float(x.abs().nan_to_num(0).amax()) for x in slices(a, dim, rows) if x.numel()), default=0.0)
    tolerance = _ROW_TOLERANCE.get(a.dtype, _HALF_ROW_TOLERANCE) * largest
    return any(
        not bool(((x - y).abs() <= tolerance).logical_or(x.isnan() & y.isnan()).logical_or(x == y).all())
        for x, y in zip(slices(a, dim, rows), slices(b, dim, rows), strict=True)
    )


def slices(tensor: Tensor, dim: int, rows: Tensor) -> Iterator[Tensor]:
    """Yield these rows, flat, `SLICE` elements at a time: whole logits would take more memory than a step."""
    tensor = tensor.movedim(dim, 0)
    for group in torch.split(rows, max(1, SLICE // max(1, tensor[:1].numel()))):
        part = tensor[int(group)] if len(group) == 1 else tensor.index_select(0, group.to(tensor.device))
        yield from torch.split(part.reshape(-1), SLICE)


def _altered(leaf: Tensor) -> Tensor:
    """Return another sample of the same shape."""
    return 2 * leaf + 1 if leaf.is_floating_point() else torch.zeros_like(leaf)


def _apart(plain: Tensor, first: Tensor, last: Tensor, dim: int) -> bool:
    """Return whether no part along `dim` depends on both the first and the last sample."""
    of_first, of_last = (
        (other.nan_to_num() != plain.nan_to_num()).movedim(dim, 0).flatten(1).any(1)
        if plain.dim() > 1
        else other.nan_to_num() != plain.nan_to_num()
        for other in (first, last)
    )
    return not bool((of_first & of_last).any())


def is_coarse(tensor: Tensor) -> bool:
    """Return whether products that lead to the tensor may be rounded to less than its dtype: autocast, TF32."""
    reads_tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    return torch.is_autocast_enabled(tensor.device.type) or (tensor.is_cuda and reads_tf32)


def _inputs(run: Run) -> list[Key]:
    """Return the keys of layers' inputs, without those of outputs."""
    return [key for key in run.seen if not isinstance(key[0], OutputOf | None)]
