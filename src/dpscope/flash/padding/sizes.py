"""Sizes that batches are padded to, from the distribution of the draws.

A draw becomes one batch, of the smallest size that holds it, or two if it is larger than the largest size: a main size
and the remainder size. Main sizes are the mean plus `MAIN` standard deviations, the remainder is `REMAINDER` of them.

These numbers cost at most 1.1% more rows and batches (counted as `BATCH_COST`) than the best four sizes for expected
draws from 16 to 4,096, which a search over all of them had found, and 1.7% for a draw of 8 (computed, 2026-11-17).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from dpscope.errors import UserError

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
