"""A rehearsal of a forward pass: which rows of which layer belong to which sample, determined by running it.

The first time the model is called in some way, its forward runs a few times more, without gradients, random numbers
and buffers put back each time:

1. as it is;
2. with one sample replaced by another, and, in the same row, the output of every layer changed (for the first sample,
   then for the last). In the inputs of all layers and in the model's output only the row of that sample may be another
   than in the first run. So positions that have the size of the batch by chance, a batch in another dimension, and
   samples that mix are found, whatever the sizes;
3. for layers whose input is the same whatever the samples are, with one sample more: there must be one row more;
4. again as in 2, with the outputs of all layers changed: this reveals what a layer of zeros (a gate that is closed at
   first) hides. An output without the batch's size must not join samples either;
5. for layers whose input has a single row, shared by all samples and expanded here, with that layer's output alone
   changed: it must show, and only in the row of that sample.

It costs a few forward passes once, and nothing afterwards. `known` and `shared` of a tap remember the result, by the
number of dimensions of x.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash.sample_rows.mixing import mixing_found, replaced
from dpscope.flash.sample_rows.proxy import NotFollowed
from dpscope.flash.sample_rows.rehearsal_run import Key, ModelSnapshot, OutputOf, Run, Sampled, SeenTensor
from dpscope.flash.sample_rows.tried_call import PUT_BATCH_FIRST, RootCall, TriedCall, apart_from
from dpscope.flash.torch_side.arguments import KEEP_BATCH_FIRST, leaves_in


class Rehearsal(TriedCall):
    """The rehearsal of one call.

    rehearsing  a context in which taps tell a run what they are given
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
        super().__init__(call, model, in_any_dim=in_any_dim, shared=shared)
        self.rehearsing = rehearsing
        self.suspects: Sequence[nn.Module] = ()  # modules that are looked at first
        self.row = 0  # the sample that is changed
        self._snapshot = ModelSnapshot(model)
        self.shifted = False  # whether the runs are with the outputs of all layers changed
        self._content: Run | None = None

    def _run(self, run: Run, index: list[int] | None = None) -> Run:
        """Run the forward on the samples `index` (None: all, in order), and leave no trace of it."""
        run.shifted = self.shifted
        with self._snapshot.kept():
            output = self.run_on(index, self.rehearsing(run))
            for leaf in leaves_in(output):
                if isinstance(leaf, Tensor):
                    run.see(None, leaf, tuple(range(leaf.dim())))
        return run

    def _replaced(self) -> list[int]:
        return replaced(self.batch, self.row)

    # -- judging -----------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Note what is known of every layer that was reached; raise UserError where rows are not samples."""
        refusals: list[BaseException] = []
        for _ in self.readings():
            self._content = None
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
        if self.sampled:
            self._check_constant([key for key in _inputs(plain) if key not in moved], plain)
        self._check_shared(plain)
        for tap, _ in plain.constants:
            tap.known.add(0)
        for key in _inputs(plain):
            seen = plain.seen[key]
            (key[0].shared if seen.shared else key[0].known).add(len(seen.shape))

    def _check_constants(self, plain: Run, changed: Run) -> None:
        """Require that tensors combined with bare parameters, outside of uses, do not depend on the samples."""
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
        return all(apart_from(before.value, after.value, dim, others) for dim in dims)

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
        """Refuse samples that mix; if only rows of layers are not the samples, tap the modules around them."""
        wrong = list(self._suspects(plain, self.content()))
        if any(tap is None for tap, _ in wrong):
            raise mixing_found(self.batch)
        if not wrong:
            self._refuse_reaching(plain)
        found = [tap for tap, _ in wrong or [key] if tap is not None]
        if not found:
            raise mixing_found(self.batch)
        first = found[0]
        if isinstance(first, OutputOf):
            reason = f"{first.unit.name} ({type(first.unit.module).__name__}) mixes samples. {PUT_BATCH_FIRST}"
        else:
            reason = (
                f"{self._given(first, plain)}, but rows of other samples change when one sample does: its rows are not "
                f"the samples, or samples were mixed before. {PUT_BATCH_FIRST}"
            )
        units = [tap.unit if isinstance(tap, OutputOf) else tap for tap in found]
        raise NotFollowed(_modules_of(units), reason, climb=True)

    def _refuse_reaching(self, plain: Run) -> None:
        """Find layers whose changed output row reaches other samples: their rows are not the samples.

        Layers whose input does not depend on samples are found all at once, because they are followed. With another one
        go its like in other blocks, if the self-test suspects them, too.
        """
        moved = self._moved(plain, self.content())
        still = {key[0] for key in _inputs(plain) if not any(flag.any() for flag in moved.get(key, ()))}
        taps: list[Sampled] = list(dict.fromkeys(tap for tap, _ in _inputs(plain)))
        suspected = [tap for tap in taps if tap.module in self.suspects]
        odd: list[Sampled] = []
        for tap in dict.fromkeys((*suspected, *taps)):
            if odd and suspected and tap not in suspected:
                break
            if not self._wrong_rows(plain, self._run(Run(self.batch, self.row, only=tap))):
                continue
            if tap not in still and not odd:
                alike = [each for each in suspected if _in_any_block(each) == _in_any_block(tap)]
                reason = f"{self._given(tap, plain)}, but a row of its output reaches other samples, too: its rows are "
                raise NotFollowed(_modules_of([tap, *alike]), f"{reason}not the samples. {PUT_BATCH_FIRST}", climb=True)
            if tap in still:
                odd.append(tap)
        if odd:
            reason = f"{self._given(odd[0], plain)}, which has nothing of the samples. {PUT_BATCH_FIRST}"
            raise NotFollowed(_modules_of(odd), reason)

    def _refusal_of_constant(self, keys: list[Key], plain: Run, why: str) -> NotFollowed:
        reason = f"{self._given(keys[0][0], plain)}, which does not depend on the samples ({why}). {PUT_BATCH_FIRST}"
        return NotFollowed(_modules_of([tap for tap, _ in keys]), reason)

    def _refuse_shared(self, taps: list[Sampled]) -> None:
        raise NotFollowed(
            _modules_of(taps),
            f"{taps[0].name} was given a tensor with one row for all {self.batch} samples, and its output is not "
            "simply broadcast over them. Give it a row for each sample (x.expand(batch_size, ...))",
        )


def _modules_of(taps: Iterable[Sampled]) -> list[nn.Module]:
    return list(dict.fromkeys(tap.module for tap in taps))


def _in_any_block(tap: Sampled) -> str:
    """Return the name of a layer without the numbers of blocks and experts."""
    return re.sub(r"\d+", "#", tap.name)


def _inputs(run: Run) -> list[Key]:
    """Return the keys of layers' inputs, without those of outputs."""
    return [key for key in run.seen if not isinstance(key[0], OutputOf | None)]
