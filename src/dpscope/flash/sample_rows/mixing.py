"""Test if samples mix: run the untouched model on other samples and compare its outputs.

Row b of the output may depend on sample b alone: not on the others in its batch, not on their number, and not on
samples of an earlier step. Each question compares forward passes that differ in one thing and start from the same
random state. Random states, buffers and attributes of the model are restored.

The first time the model is called in some way, all questions are asked on a quarter of the batch: also with another
order of the samples and other random numbers, and with parameters that are zero set to others, because a gate that is
closed at first hides what it multiplies. Later passes are checked now and then (schedule.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpscope.endings import lacks_memory
from dpscope.errors import UserError
from dpscope.flash.sample_rows.comparison import (
    any_apart,
    apart_from,
    common_parts,
    dim_of_samples,
    is_coarse,
    largest,
    no_part_depends_on_both,
)
from dpscope.flash.sample_rows.proxy import NotFollowed, RanOutOfMemory
from dpscope.flash.sample_rows.told_numbers import Told
from dpscope.flash.sample_rows.tried_call import PUT_BATCH_FIRST, RANDOM, TriedCall
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.arguments import ArgumentPlace, leaves_in, tensors_in
from dpscope.flash.torch_side.autocast import no_autocast
from dpscope.flash.torch_side.autograd_graph import nothing_saved
from dpscope.flash.torch_side.dropout import WithoutDropout
from dpscope.flash.torch_side.dry_run import read
from dpscope.flash.torch_side.module_state import ModuleState
from dpscope.flash.torch_side.shards import is_sharded
from dpscope.places import number_in
from dpscope.random_states import RandomStates, seed_all

DRAWS, MORE_DRAWS = 3, 10
"""Other random numbers that a model is tried with, later and in the first batch, if it draws some besides dropout's:
it may mix samples in some draws, as manifold mixup does."""
_FULL_PRECISION = {torch.float32, torch.float64}
# How far a sample's output may move with the number of samples, by rounding alone: of its size, and of what tells two
# samples apart.
_SAME, _SAME_SHARE, _SAME_FLOAT64 = 1e-5, 1e-4, 1e-9
# The same in float64, asked of a model that moved by more in its own dtype. Some of its modules may compute in float32.
_CONFIRMED = 1e-6
_ANOTHER = 0.1  # of its size: an output that differs by more in float64 is that of another branch
_VANISHED = 1e-6  # of its size in float32: what is left in float64 of an output that is only rounding
_WIDE_NUMEL = 1 << 18  # parameters, or elements of outputs, from which float64 serves only to confirm a refusal
_ROUNDED = {torch.float32, torch.bfloat16, torch.float16}


class Mixing(TriedCall):
    """The questions about one call."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.is_random = False  # whether the model draws random numbers besides dropout's
        self.to_the_bit = False  # whether any difference counts
        self._is_loud = False  # whether the sample that was put in place of another is a large one
        self._turn = RANDOM.randrange(6)  # of the thirds
        self._keeps_nothing = False  # whether a comparison of rows has shown that the model keeps nothing of them
        self._numel = -1  # elements of all outputs; -1 before the first run
        self._moves_with_number = False  # whether outputs moved with the number of samples, by rounding or by more
        self._sizes: list[float] = []  # largest elements of the outputs, in the model's own dtype
        self.doubt = ""  # why the plain reading of the arguments was refused, if another one was taken
        self.output_dims: list[int | None] | None = None  # of each output: the dimension of samples, once it is known

    def has_different_samples(self) -> bool:
        """Return whether any two samples differ: a batch of one sample many times shows nothing of several."""
        sampled = self.sampled_leaves()
        leaves = [leaf for leaf in leaves_in(self.call) if id(leaf) in sampled]
        dense = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
        plain = [leaf.movedim(sampled[id(leaf)], 0) for leaf in dense]
        # Packed and sparse ones are not looked into.
        return (
            self.batch == 1 or len(plain) < len(leaves) or any(read((leaf != leaf[:1]).any(), True) for leaf in plain)
        )

    def _outputs(
        self, index: list[int] | None, seed: int | None, *, altered: Sequence[int] = (), loud: int | None = None
    ) -> list[Tensor]:
        output = self.run_on(index, seed=seed, altered=altered, loud=loud)
        found = [leaf.detach().clone() for leaf in tensors_in(output)]
        if not self.wide:
            self._numel = max(self._numel, sum(each.numel() for each in found))
        return found

    # -- other samples -----------------------------------------------------------------------------------------------

    def draw(self, told: Told) -> None:
        """Refuse samples that mix in any of several draws. Set `shared`, and `told`, to the reading that fits.

        If outputs moved with the number of samples, a model that is not too large is asked in float64, too, whether
        they depend on it.
        """
        if not self.sampled and leaves_in(self.call):
            raise UserError(
                f"no argument of the model has a row for each of its {self.batch} samples, so it cannot be found out "
                f"whether they mix. {PUT_BATCH_FIRST}"
            )
        refusals, fitting = list[Exception](), list[frozenset[ArgumentPlace]]()
        for self.told in told.readings():
            if not told.surely <= self.told and any(isinstance(each, UserError) for each in refusals):
                break  # it runs with what it surely is told, and samples mix
            try:
                self._draw_reading()
            except Exception as refusal:
                refusals.append(refusal)
                continue
            if not told.maybe or any(dim is not None for dim in self.output_dims or ()):
                return
            fitting.append(self.told)  # no output has a row for each sample: other shapes may have come by chance
        if not fitting:
            raise next((each for each in refusals if isinstance(each, UserError)), refusals[0])
        self.told = fitting[0]
        self._draw_reading()

    def _draw_reading(self) -> None:
        self._confirmed(self._draw)
        if not self._moves_with_number or dry_run.current() is not None:
            return
        if max(self._numel, sum(parameter.numel() for parameter in self.model.parameters())) <= _WIDE_NUMEL:
            refusal = self._in_float64(lambda: self._compare_sizes(self.rows()))
            if isinstance(refusal, UserError):
                raise refusal

    def look_again(self, *, whole: bool) -> None:
        """Compare some rows with the random numbers of the step; `whole`: look for state that is kept, too."""
        further = partial(self._draw_others, DRAWS) if self.is_random else lambda: None
        self._confirmed(lambda: self._try_readings(further, whole=whole))

    def compare_sizes(self) -> None:
        """Compare a few samples with the whole batch: a model may branch on their number, and mix many."""
        self._confirmed(lambda: self._compare_sizes(list(range(self.batch))))

    def _draw(self) -> None:
        self._try_readings(partial(self._draw_others, 1, runs=3), whole=True)
        self._compare_sizes(list(range(self.batch)))
        if self.is_random:
            self._draw_others(MORE_DRAWS)
        if self.output_dims is not None and not any(dim is not None for dim in self.output_dims):
            self._look_at_parts()

    def _confirmed(self, question: Callable[[], None]) -> None:
        """Refuse what any difference shows, however small, unless it is only rounding.

        Rows of samples that were not replaced are computed in the same way as before, so they are the same to the last
        bit, unless another kernel is chosen for the others. Then the same question is asked in float64, where rounding
        is smaller. If the model cannot run in float64, or draws random numbers, which would be others there, outputs
        may differ by what rounding does in their dtype.
        """
        choices, is_loud, turn = RANDOM.getstate(), self._is_loud, self._turn

        def again() -> None:
            RANDOM.setstate(choices)
            self._is_loud, self._turn = is_loud, turn
            question()

        self.to_the_bit = True
        try:
            question()
            return
        except UserError:
            pass
        finally:
            self.to_the_bit = False
        if not self._draws_random_numbers():
            answer = self._in_float64(again)
            if answer is None and self._is_the_same_in_float64():
                return
            if isinstance(answer, UserError):
                raise answer
            if answer is not None and lacks_memory(answer):
                try:
                    again()
                except UserError:  # or it is rounding, which cannot be told
                    raise RanOutOfMemory(answer) from None
                return
        again()

    def _is_the_same_in_float64(self) -> bool:
        """Return whether outputs in float64 are those of the model's dtype: it may do something else in another one."""
        rows, wide = self.rows(), list[Tensor]()
        with self.untouched():
            own = self._outputs(rows, 1)

        def run() -> None:
            with self.untouched():
                wide.extend(self._outputs(rows, 1))

        failed = self._in_float64(run) is not None or len(wide) != len(own)
        pairs = [both for both in zip(own, wide, strict=False) if both[0].is_floating_point()]
        return not failed and all(mine.shape == other.shape and _same_branch(mine, other) for mine, other in pairs)

    def _draws_random_numbers(self) -> bool:
        with self.untouched():
            before = RandomStates.now(self.devices)
            self._outputs(self.rows(), None)
            return not before.equals(RandomStates.now(self.devices))

    def _in_float64(self, question: Callable[[], None]) -> Exception | None:
        """Ask a question with parameters, buffers and arguments in float64; return the error that it ends with."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if not any(tensor.dtype in _ROUNDED for tensor in tensors) or any(map(is_sharded, tensors)):
            return TypeError("nothing to ask in float64")
        free = number_in("/proc/meminfo", r"^MemAvailable:\s+(\d+)")  # without it, a CPU's process would be killed
        if free is not None and sum(8 * each.numel() for each in tensors if each.device.type == "cpu") > 512 * free:
            return TypeError("copies in float64 would take more than half of the memory that is free")
        try:
            with self.untouched():
                self._sizes = [largest(each) for each in self._outputs(self.rows(), 1)]
            self.wide = True
            with in_float64(tensors), no_autocast(tensors[0].device.type):
                question()
        except RanOutOfMemory as end:
            return end.error
        except Exception as error:
            return error
        finally:
            self.wide = False
        return None

    def _try_readings(self, further: Callable[[], None], *, whole: bool) -> None:
        """Find a reading of the arguments by which samples do not mix, by one check and by `further` ones.

        Mixing found only by further checks must not be explained by an argument that relates all samples to each other:
        it would have to be the same in every step.
        """
        refusals: list[Exception] = []
        shown, tried = True, set[frozenset[int]]()
        for of_any_shape in (False, True):
            for _ in self.readings(of_any_shape=of_any_shape):
                rows = self.rows()
                if self.shared in tried or (not shown and self._shares_relation()):
                    continue
                tried.add(self.shared)
                try:
                    if not (whole and self._shows_nothing_in_steps(rows)):
                        self._compare_rows(rows, None)
                    shown = False
                    further()
                    self.doubt = str(refusals[0]) if refusals and isinstance(refusals[0], UserError) else ""
                    return
                except Exception as error:
                    refusals.append(error)
            if isinstance(refusals[0], UserError):  # it ran, and samples mix; otherwise rows were of no sample
                break
        raise refusals[0]

    def _shows_nothing_in_steps(self, rows: list[int]) -> bool:
        """Return whether samples do not mix, and nothing is kept of those of an earlier run.

        Runs that follow each other like steps answer both questions at once. If anything shows, or a run fails, they
        have to be asked one by one.
        """
        self._keeps_nothing = False
        if not self.to_the_bit or dry_run.current() is not None:
            return False
        try:
            with self.untouched():
                self._compare_rows(rows, None, in_steps=True)
        except (Exception, NotFollowed):
            if self._numel < 0:  # the very first run
                raise
            return False
        self._keeps_nothing = True
        return True

    def _shares_relation(self) -> bool:
        """Return whether an argument with two dimensions of the batch's size is taken to be shared by all samples."""
        leaves = enumerate(leaves_in(self.call))
        tensors = [leaf for place, leaf in leaves if place in self.shared and isinstance(leaf, Tensor)]
        return any(list(leaf.shape).count(self.batch) > 1 for leaf in tensors)

    def _draw_others(self, draws: int, *, runs: int = 2) -> None:
        """Compare rows in other orders of the samples, with other random numbers and opened gates."""
        for _ in range(draws if dry_run.current() is None else 0):
            seed, rows = RANDOM.getrandbits(31), self.rows()
            order = RANDOM.sample(rows, len(rows))
            self.across = torch.tensor(order) if len(order) == self.batch else None
            with self.opened_gates():
                try:
                    self._compare_rows(order, seed, runs=runs)
                except (UserError, NotFollowed):
                    raise
                except Exception:  # a model that asks for samples in a given order, say sorted by length
                    self.across = None
                    self._compare_rows(rows, seed, runs=runs)
                finally:
                    self.across = None

    def _compare_rows(self, index: list[int], seed: int | None, *, runs: int = 3, in_steps: bool = False) -> None:
        """Refuse a model in whose output the rows of some samples change with the others.

        The samples are cut into random thirds. Of three runs, the second one keeps the first third and the third one
        the second: any two have one third in common, and the rest of the batch differs. Many replaced samples show more
        than one does: whether any is the longest, or which branch their mean takes. If there are no other samples, the
        two parts are halves, and the one that is kept is all that a run has: the largest sample is gone in one of them.
        With `in_steps` runs follow each other like steps: what modules keep stays, and each run finds another state.
        Samples that take the place of others are altered then.
        """
        others = sorted(set(range(self.batch)) - set(index))
        thirds = self._thirds(len(index), 3 if others else 2)
        instead = dict[int, int]()
        for part, third in enumerate(thirds):
            for place in third:
                left = [index[other] for other in thirds[1 - part] if index[other] != index[place]]
                instead[place] = RANDOM.choice(others or left or [row for row in index if row != index[place]])
        tried, found = list[list[int]](), list[list[Tensor]]()
        for run in range(3 if len(index) == 2 else runs):
            kept = thirds[run - 1] if run else range(len(index))
            tried.append([row if place in kept else instead[place] for place, row in enumerate(index)])
            self._is_loud ^= run > 0
            loud = RANDOM.choice(thirds[2 - run]) if run and self._is_loud else None
            altered = [place for place in range(len(index)) if in_steps and place not in kept]
            with self.untouched(attributes=not in_steps):
                found.append(self._outputs(tried[run], seed, altered=altered, loud=loud))
            for before, third in ((0, thirds[run - 1]), (1, thirds[2]))[:run]:
                self._require_same([tried[before], tried[run]], [found[before], found[run]], seed, third)

    def _thirds(self, count: int, number: int) -> list[list[int]]:
        """Return random thirds of so many places, in an order that is another one each time; or halves, and no third.

        The first place and the last are never in the same part: a flip could leave each part to itself.
        """
        self._turn += 1
        places = [*RANDOM.sample((0, count - 1), 2), *RANDOM.sample(range(1, count - 1), count - 2)]
        parts = [places[start::number] for start in range(number)]
        turn = self._turn % len(parts)
        return [*parts[turn:], *parts[:turn], []][:3]

    def _require_same(
        self, tried: list[list[int]], found: list[list[Tensor]], seed: int | None, places: list[int]
    ) -> None:
        """Refuse samples that mix if the rows at these places differ between the outputs of two runs."""
        kept = torch.tensor(places)
        for output, (before, after) in enumerate(zip(*found, strict=False)):
            if places and self._moved(before, after, len(tried[0]), kept, self._allowed_share(output, before)):
                where = self._where(tried, seed, kept)
                raise UserError(
                    f"samples mix{where}: in a batch of {self.batch}, what the model gives for one sample changes with "
                    f"the others. {PUT_BATCH_FIRST}"
                )

    def _moved(self, before: Tensor, after: Tensor, rows: int, kept: Tensor, share: float | None) -> bool:
        """Return whether the rows `kept` of an output differ, whichever dimension is that of the samples.

        Sizes may follow the longest sample. What both outputs have then counts, from the beginning or to the end.
        """
        if before.dim() != after.dim():
            return False
        both = zip(before.shape, after.shape, strict=True)
        dims = [dim for dim, sizes in enumerate(both) if sizes == (rows, rows)]
        return bool(dims) and all(
            all(apart_from(*pair, dim, kept, share=share) for pair in common_parts(before, after)) for dim in dims
        )

    def _where(self, runs: list[list[int]], seed: int | None, kept: Tensor) -> str:
        """Return the first module whose output for the samples that are kept differs between two runs, as words."""
        seen: list[list[tuple[str, Tensor]]] = []

        def note(module: nn.Module, args: object, output: object) -> None:
            seen[-1].extend((names[module], leaf.detach().clone()) for leaf in tensors_in(output))

        names = {module: f"{name} ({type(module).__name__})" for name, module in self.model.named_modules() if name}
        hooks = [module.register_forward_hook(note) for module in names]
        try:
            for rows in runs:
                seen.append([])
                with self.untouched():
                    self._outputs(rows, seed)
        except Exception:  # it cannot be told
            return ""
        finally:
            for hook in hooks:
                hook.remove()
        for (name, first), (_, second) in zip(*seen, strict=False):
            rows_there = first.dim() and first.shape[0] == len(runs[0]) and first.shape == second.shape
            if rows_there and apart_from(first, second, 0, kept):
                return f" in {name}"
        return ""

    def _allowed_share(self, output: int, found: Tensor) -> float | None:
        """Return by how much of its largest element an output may move; None: by what rounding does in its dtype.

        In float64 that is relative to the output in the model's own dtype: if it is only rounding, it is smaller.
        """
        if self.wide:
            return _CONFIRMED * max(1.0, self._sizes[output] / max(largest(found), 1e-300))
        return 0.0 if self.to_the_bit else None

    # -- their number ------------------------------------------------------------------------------------------------

    def _compare_sizes(self, index: list[int]) -> None:
        """Refuse a model whose output for a sample depends on how many there are, or on its place among them.

        The last of the samples and the first are run by themselves, in this order. The dimension of an output that has
        fewer entries for fewer samples is that of the samples. Dropout is switched off, because it draws other numbers
        for fewer samples. If the model draws others besides, no verdict is given.
        """
        last, half = len(index) - 1, list(range(len(index) // 2))
        some = [[last, 0], [last], half] if last > 1 else [[last], half]  # some models do not take one, or an order
        numel = self._numel
        try:
            many = self._outputs_of_many(index, nothing_saved())
        except Exception:  # a model that takes gradients itself
            many = self._outputs_of_many(index, nullcontext())
        self._numel = numel
        for places in some:
            try:
                with self.untouched(), WithoutDropout():
                    few = self._outputs([index[place] for place in places], 1)
                break
            except (Exception, NotFollowed):
                continue
        else:
            return
        sizes = len(places), len(index)
        if len(few) == len(many):
            self.output_dims = [dim_of_samples(*both, *sizes) for both in zip(few, many, strict=True)]
        pairs = enumerate(zip(few, many, strict=False))
        differ = (self._row_differs(*both, places, len(index), output) for output, both in pairs)
        if not self.is_random and any(differ):
            raise UserError(
                "what the model gives for a sample depends on how many samples are in its batch, or on its place "
                f"among them ({sizes[0]} of {sizes[1]} alone give something else): divide by a fixed number, or "
                "leave the mean to the loss"
            )

    def _outputs_of_many(self, index: list[int], saving: AbstractContextManager[object]) -> list[Tensor]:
        with self.untouched(), WithoutDropout(), saving:
            seed_all(1, self.devices)
            before = RandomStates.now(self.devices)
            many = self._outputs(index, None)
            self.is_random = not before.equals(RandomStates.now(self.devices))
        return many

    def _row_differs(self, few: Tensor, many: Tensor, places: list[int], rows: int, output: int) -> bool:
        """Return whether the output for any sample by itself is not that in the batch, by more than rounding."""
        dim = dim_of_samples(few, many, len(places), rows)
        if dim is None or not few.is_floating_point() or not few.numel():
            return False
        a, b = (each.movedim(dim, 0).reshape(each.shape[dim], -1) for each in (few, many))
        if a.shape[1] != b.shape[1]:
            return False
        same = b.index_select(0, torch.tensor(places, device=b.device))
        apart, size = (torch.linalg.vector_norm(each.double(), dim=1) for each in (a - same, same))
        dtypes = {parameter.dtype for parameter in self.model.parameters()}
        if not self.wide:
            confirmed = _CONFIRMED * torch.maximum(size, size.new_tensor(largest(b)))
            self._moves_with_number |= bool(read((apart > confirmed).any(), True))
        if self.wide and (share := self._allowed_share(output, many)) is not None:
            allowed = share * torch.maximum(size, size.new_tensor(largest(b)))
        elif is_coarse(few) or not dtypes <= _FULL_PRECISION:
            allowed = 0.1 * size
        elif dtypes == {torch.float64}:
            allowed = _SAME_FLOAT64 * size
        else:
            told_apart = torch.linalg.vector_norm((b[:1] - b[1:2]).double())  # what tells one sample from another
            allowed = torch.maximum(_SAME_SHARE * told_apart, _SAME * size.amax())
        return bool(read((apart > allowed).any(), False))

    # -- outputs without rows ----------------------------------------------------------------------------------------

    def _look_at_parts(self) -> None:
        """Refuse outputs without a dimension of samples if each part of them is made of two samples.

        This finds a list of samples whose first one has rows that are not samples.
        """
        runs = [self._whole_outputs(row) for row in (None, 0, self.batch - 1)]
        if len({tuple(each.shape for each in run) for run in runs}) > 1:
            return
        for before, first, last in zip(*runs, strict=True):
            if not any(no_part_depends_on_both(before, first, last, dim) for dim in range(before.dim())):
                raise UserError(
                    f"the model was taken to be called with {self.batch} samples, but each part of its output of "
                    f"shape {tuple(before.shape)} depends on several: they mix, or are not the rows of its first "
                    f"argument (is it a list of samples?). {PUT_BATCH_FIRST}"
                )

    def _whole_outputs(self, row: int | None) -> list[Tensor]:
        """Return the real outputs with at least one dimension, sample `row` replaced."""
        with self.untouched():
            found = self._outputs(None if row is None else replaced(self.batch, row), None)
        return [value for value in found if value.dim() and value.is_floating_point()]

    # -- earlier steps -----------------------------------------------------------------------------------------------

    def find_carried_state(self) -> None:
        """Refuse a model that keeps something of its samples for the next step, wherever it keeps it.

        It runs on a batch, and then on another: the output for the second must not depend on the first. Buffers are
        checked elsewhere, and restored in between.
        """
        if self._keeps_nothing or dry_run.current() is not None:
            return
        rows = self.rows()
        first, second = (self._second_of_two(rows, altered=altered) for altered in (False, True))
        if not any_apart(first, second, len(rows), repeated=True):
            return
        # The same runs give the same, unless the device adds up in another order each time.
        repeats = not any_apart(first, self._second_of_two(rows, altered=False), len(rows), repeated=True)
        if repeats or any_apart(first, second, len(rows)):
            self._refuse_carried(rows)

    def _second_of_two(self, rows: list[int], *, altered: bool) -> list[Tensor]:
        """Return the outputs for `rows` after a run on the same samples, or on others if `altered`."""
        first, others = (self._shifted(rows), range(len(rows))) if altered else (rows, ())
        with self.untouched():
            with self.untouched(attributes=False):  # buffers are put back
                try:
                    self._outputs(first, 1, altered=others)
                except (ValueError, RuntimeError, AssertionError) as error:  # a model that takes no values below zero
                    if lacks_memory(error):
                        raise
                    self._outputs(first, 1)
            return self._outputs(rows, 2)

    def _shifted(self, rows: list[int]) -> list[int]:
        """Return as many other samples, not just a permutation, which a mean would not reveal."""
        others = [(row + 1) % self.batch for row in rows]
        return [others[-1], *others[1:]] if len(rows) == self.batch else others

    def _refuse_carried(self, rows: list[int]) -> None:
        with self.untouched():
            state = ModuleState(self.model)
            self._outputs(rows, 1)
            names = sorted(state.take_changes())
        where = f"in {', '.join(names[:3])}" if names else "outside of its modules"
        raise UserError(
            f"the model keeps something of its samples from one step to the next ({where}): samples of one step would "
            "reach the next without noise. Reset it in forward, or detach it from training"
        )

    def watch_with_others(self, note: Callable[[], Any]) -> list[Any]:
        """Return `note`'s results after runs on the original batch, and with the first and last sample replaced."""
        found = []
        for row in (None, 0, self.batch - 1) if self.batch > 1 else (None, 0):
            with self.untouched():
                alone = self.batch == 1 and row is not None
                index = None if row is None or alone else replaced(self.batch, row)
                self._outputs(index, None, altered=[0] if alone else ())
                found.append(note())
        return found


def _same_branch(own: Tensor, wide: Tensor) -> bool:
    """Return whether two outputs differ by rounding alone. One that is only rounding vanishes in float64."""
    apart, size, before = (each.nan_to_num().double().norm() for each in (own - wide, wide, own))
    return bool(read((apart <= _ANOTHER * size) | (size <= _VANISHED * before), True))


@contextmanager
def in_float64(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Have parameters and buffers hold their values in float64 inside the block."""
    before = [(tensor, tensor.data) for tensor in tensors if tensor.dtype in _ROUNDED]
    try:
        for tensor, data in before:
            tensor.data = data.double()
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def replaced(batch: int, row: int) -> list[int]:
    """Return indices of samples, that of `row` replaced by its neighbour."""
    index = list(range(batch))
    index[row] = 1 if row == 0 else row - 1
    return index
