"""A data loader whose batches have few sizes: a draw is cut into batches, and what is missing in them is filled up.

The sampler decides in the process that trains, and encodes it in the indices themselves. Workers, pinned memory and
Opacus's BatchMemoryManager (which cuts lists of indices) pass these on unchanged. The collate function is the user's
own and sees samples alone, which it may sort or leave out; what it returns is filled up with copies of its first row.

Sizes follow from the distribution of the draws. A draw becomes one batch, of the smallest size that holds it, or two if
it is larger than the largest size: a main size and the remainder size. Main sizes are the mean plus `MAIN` standard
deviations, the remainder is `REMAINDER` of them. These numbers cost at most 1.1% more rows and batches (counted as
`BATCH_COST`) than the best four sizes for expected draws from 16 to 4,096, which a search over all of them had found,
and 1.7% for a draw of 8 (computed, 2026-11-17).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Sampler

from dpscope.errors import UserError
from dpscope.flash.padding.rows import Rows, pad_leaves
from dpscope.flash.ranks.sampling import ABSENT_SAMPLE, PresentSamples
from dpscope.flash.torch_side.arguments import leaves_in, rows_of
from dpscope.flash.torch_side.derived_loaders import WrappedDataset, derive_loader
from dpscope.random_states import random_states_kept

PadBatches = bool | int | Sequence[int]

# -- sizes -------------------------------------------------------------------------------------------------------------

# What a batch costs beside its rows (launches, one more pass over the weights), in rows of the expected draw.
BATCH_COST = 1 / 16
MAIN, REMAINDER = (-0.8, -0.1, 0.6), 1.8  # standard deviations
NEVER_DRAWN = 1e-9  # draws for which no size is held ready
NEGLIGIBLE_MASS = 1e-12

Masses = npt.NDArray[np.float64]


class Sizes:
    """The sizes of batches, and how draws are cut into them at the least cost."""

    def __init__(self, sizes: Iterable[int], masses: Masses | None = None) -> None:
        """Prepare the sizes. `masses[n]` is the probability that n samples are drawn, if it is known."""
        self.sizes = tuple(sorted(set(sizes)))
        self._cost = BATCH_COST * self.sizes[-1]
        self._best: list[tuple[float, int]] = [(0.0, 0)]  # of n samples: their cost, and the size to begin with
        self.expected_share = None if masses is None else self._share(masses)

    def cut(self, count: int) -> list[int]:
        """Return the sizes of the batches for `count` samples: at least one."""
        largest = self.sizes[-1]
        full = max(0, count // largest - 2)  # what is cut in other ways is bounded
        return [largest] * full + self._cut(max(1, count - full * largest))

    def _cut(self, count: int) -> list[int]:
        while len(self._best) <= count:
            left = len(self._best)
            ways = ((size + self._cost + self._best[max(0, left - size)][0], -size) for size in self.sizes)
            cost, size = min(ways)
            self._best.append((cost, -size))
        cuts = []
        while count > 0:
            cuts.append(self._best[count][1])
            count -= cuts[-1]
        return cuts

    def _share(self, masses: Masses) -> float:
        """Return the expected share of padding among all rows."""
        counts = np.arange(len(masses))
        rows = float(masses @ np.array([sum(self.cut(int(n))) for n in counts], dtype=np.float64))
        return 1.0 - float(masses @ counts) / rows


class SizesInTurn:
    """Cuts draws one after the other. Early draws show every size, so that nothing is compiled later."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._unseen = list(sizes.sizes)

    def cut(self, count: int) -> list[int]:
        if self._unseen:
            cut = self.sizes.cut
            cuts = [[size] if count <= size else [size, *cut(count - size)] for size in self._unseen]
            chosen = min(cuts, key=sum)
            self._unseen = [size for size in self._unseen if size not in chosen]
            return chosen
        return self.sizes.cut(count)


def given_sizes(sizes: int | Iterable[int]) -> Sizes:
    """Return the sizes that the user gave, checked."""
    chosen = list(sizes) if isinstance(sizes, Iterable) else [sizes]
    if not chosen or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in chosen):
        raise UserError(
            f"pad_batches={sizes!r}: give True, the number of rows that every batch is to have, or a list of such sizes"
        )
    return Sizes(chosen)


def poisson_sizes(samples: int, sample_rate: float, ranks: int = 1) -> Sizes:
    """Return the sizes for Poisson draws from `samples` samples, shared by `ranks` processes."""
    masses = binomial(samples, sample_rate)
    if ranks > 1:  # the longest share of n samples is ceil(n / ranks)
        shares = -(-np.arange(len(masses)) // ranks)
        masses = np.bincount(shares, weights=masses).astype(np.float64)
    counts = np.arange(len(masses))
    mean = float(masses @ counts)
    spread = math.sqrt(max(0.0, float(masses @ counts**2) - mean**2))
    main = [math.ceil(mean + share * spread - 1e-9) for share in MAIN]
    sizes = Sizes(max(1, size) for size in (*main, round(REMAINDER * spread or mean)))
    used = {size for n, mass in enumerate(masses) if mass > NEVER_DRAWN for size in sizes.cut(n)}
    return Sizes(used, masses)


def binomial(samples: int, rate: float) -> Masses:
    """Return P(n) for n = 0, 1, …, as far as it is not negligible."""
    from scipy.stats import binom  # type: ignore[import-untyped]  # takes a second to load

    last = int(binom.isf(NEGLIGIBLE_MASS, samples, rate))
    masses: Masses = binom.pmf(np.arange(last + 1), samples, rate)
    masses /= masses.sum()
    return masses


# -- batches -----------------------------------------------------------------------------------------------------------


class IndexCode:
    """An index and the facts about its batch, encoded as one number. Index `samples` is padding."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def encode(self, indices: Sequence[int], draw: int, *, more: bool) -> list[int]:
        batch = (2 * draw + more) * (self.samples + 1)
        return [batch + index for index in indices]

    def decode(self, codes: Sequence[int]) -> tuple[list[int], Rows]:
        """Return the indices of the samples in a batch, and its rows."""
        batch, _ = divmod(codes[0], self.samples + 1)
        real = [index for code in codes if (index := code % (self.samples + 1)) != self.samples]
        return real, Rows(len(real), len(codes), batch // 2, bool(batch % 2))


class PaddingSampler(Sampler[list[int]]):
    """The batches of another batch sampler, cut and filled up to `sizes`."""

    def __init__(self, sampler: Any, samples: int, sizes: Sizes) -> None:
        self.sampler = sampler
        self.code = IndexCode(samples)
        self.sizes = sizes
        self._in_turn = SizesInTurn(sizes)
        self._draws = 0

    def __len__(self) -> int:
        """Return the number of draws. A draw that is larger than the largest size becomes several batches."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        padding = self.code.samples
        for drawn in self.sampler:
            # Ranks mark what another rank has: lists are as long on all of them, so all of them cut alike.
            left = [padding if index == ABSENT_SAMPLE else int(index) for index in drawn]
            sizes = self._in_turn.cut(len(left))
            draw, self._draws = self._draws, self._draws + 1
            for number, size in enumerate(sizes, 1):
                batch, left = left[:size], left[size:]
                batch += [padding] * (size - len(batch))
                yield self.code.encode(batch, draw, more=number < len(sizes))


class SampleList(list[Any]):
    """The samples of a batch; for a batch of padding alone, one sample that gives it its form."""

    rows: Rows


class PaddedSamples(WrappedDataset):
    """A data set that reads batches of encoded indices."""

    def __getitems__(self, codes: Sequence[int]) -> SampleList:
        """Return the samples of a batch. torch's loader calls this with the batch's indices."""
        real, rows = IndexCode(len(self.dataset)).decode(codes)
        samples = SampleList(self.samples_at(real or [0]))
        samples.rows = rows
        return samples


class PaddedCollate:
    """Collate function that pads. `has_samples`: which tensors of a batch have a row for each sample."""

    def __init__(self, collate: Callable[[list[Any]], Any], has_samples: Sequence[bool]) -> None:
        self.collate = collate
        self.has_samples = has_samples

    @classmethod
    def of(cls, collate: Callable[[list[Any]], Any], dataset: Any) -> PaddedCollate:
        """Find the tensors that have a row for each sample by two batches, of two and of three samples."""
        with random_states_kept():
            batches = [leaves_in(collate([dataset[0] for _ in range(count)])) for count in (2, 3)]
        if len(batches[0]) != len(batches[1]):
            _refuse_batch("it returns a number of tensors that depends on the number of samples")
        has_samples = [rows_of(two) == 2 and rows_of(three) == 3 for two, three in zip(*batches, strict=True)]
        if not any(has_samples):
            _refuse_batch("no tensor that it returns has one row for each sample, in the first dimension")
        return cls(collate, has_samples)

    def __call__(self, samples: SampleList) -> Any:
        count, rows = len(samples), samples.rows
        batch = self.collate(list(samples))
        leaves = leaves_in(batch)
        if len(leaves) != len(self.has_samples):
            _refuse_batch(f"it returned {len(leaves)} tensors, and for the first sample {len(self.has_samples)}")
        of_samples = [leaf for leaf, has_samples in zip(leaves, self.has_samples, strict=True) if has_samples]
        found = {rows_of(leaf) for leaf in of_samples}
        if len(found) > 1 or max(found) > count:
            _refuse_batch(f"of {count} samples it made tensors of {sorted(found)} rows")
        real = min(rows.real, *found)  # it may have left samples out
        return pad_leaves(batch, of_samples, rows._replace(real=real))


def _refuse_batch(what: str) -> NoReturn:
    raise UserError(
        f"the loader's collate_fn gives batches that cannot be padded: {what}; have it return tensors with the samples "
        "in the first dimension, the same ones for every batch, or leave out pad_batches"
    )


class PaddedLoader(DataLoader[Any]):
    """Loader of padded batches. `sizes`: the sizes that they have, with the expected share of padding."""

    sizes: Sizes
    sample_rate: float | None


def pad_loader(loader: DataLoader[Any], pad_batches: PadBatches, *, poisson: bool) -> PaddedLoader:
    """Return the loader with batches of few sizes. The draws, and so the accounting, do not change."""
    dataset: Any = loader.dataset
    if isinstance(dataset, PresentSamples):
        dataset = dataset.dataset
    sizes = _sizes(loader, pad_batches, len(dataset), poisson=poisson)
    sampler = PaddingSampler(loader.batch_sampler, len(dataset), sizes)
    collate = PaddedCollate.of(loader.collate_fn, dataset)
    padded = derive_loader(PaddedLoader, loader, PaddedSamples(dataset), sampler, collate)
    padded.sizes = sizes
    padded.sample_rate = getattr(loader, "sample_rate", None)
    return padded


def unpadded(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the loader that a padded one was made of; any other unchanged."""
    if not isinstance(loader, PaddedLoader):
        return loader
    dataset, sampler, collate = loader.dataset, loader.batch_sampler, loader.collate_fn
    assert isinstance(dataset, PaddedSamples) and isinstance(sampler, PaddingSampler)
    assert isinstance(collate, PaddedCollate)
    return derive_loader(DataLoader, loader, dataset.dataset, sampler.sampler, collate.collate)


def _sizes(loader: DataLoader[Any], pad_batches: PadBatches, samples: int, *, poisson: bool) -> Sizes:
    if pad_batches is not True:
        return given_sizes(pad_batches)
    sampler: Any = loader.batch_sampler
    if poisson:
        control = getattr(sampler, "control", None)
        return poisson_sizes(samples, sampler.sample_rate, 1 if control is None else control.size)
    batch_size = getattr(sampler, "batch_size", None)
    if batch_size is None:
        raise UserError(
            "pad_batches=True takes the size from the loader's batch_size, and this loader has a batch sampler of its "
            "own: give the sizes, pad_batches=[64, 128]"
        )
    return given_sizes(batch_size)
