"""Tests of how a loader draws its batches: each sample with the sample rate, independently (Poisson).

Seen by the indices that its batch sampler gives, over many draws. Every test raises a false alarm with a probability of
at most `UNLIKELY`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Any

from dpscope.flash.oracle import batch_size_of

UNLIKELY = 1e-9
DRAWS_TRIED = 256  # at most
MAX_SAMPLED = 2**22  # samples in all of them together
USE_POISSON = "use the loader that make_private returns (poisson_sampling=True), or account for what this one does"

Indices = Sequence[int]


def find_sampling_faults(loader: Any, sample_rate: float | None) -> Iterator[str]:
    """Say what about the loader's draws is not Poisson sampling at this rate: one sentence, or none."""
    draws = _draws(loader)
    samples = len(loader.dataset)
    rate = sample_rate or sum(map(len, draws)) / max(1, samples * len(draws))
    if len(draws) < 2 or not samples:
        return
    sentence = next(_sentences(draws, samples, min(1.0, rate)), None)
    if sentence is not None:
        yield f"batches are not drawn by Poisson sampling, which the accountant assumes: {sentence}; {USE_POISSON}"


def _draws(loader: Any) -> list[Indices]:
    """Return the indices of batches, over several epochs; where there is no batch sampler, numbers of samples alone."""
    found: list[Indices] = []
    sampler = getattr(loader, "batch_sampler", None)
    while len(found) < DRAWS_TRIED:
        before = len(found)
        for draw in islice(loader if sampler is None else sampler, DRAWS_TRIED - before):
            found.append(range(-batch_size_of(draw), 0) if sampler is None else [int(i) for i in draw if i >= 0])
        if len(found) == before or sum(map(len, found)) > MAX_SAMPLED:
            break
    return found


def _sentences(draws: Sequence[Indices], samples: int, rate: float) -> Iterator[str]:
    from scipy import stats  # type: ignore[import-untyped]

    sizes = [len(draw) for draw in draws]
    mean = sum(sizes) / len(sizes)
    knows_samples = all(not isinstance(draw, range) for draw in draws)
    if knows_samples and any(len(set(draw)) < len(draw) for draw in draws):
        yield "a sample is in one batch more than once"
    total = stats.binom(samples * len(draws), rate)
    if 2 * min(total.cdf(sum(sizes)), total.sf(sum(sizes) - 1)) < UNLIKELY:
        yield f"they hold {mean:.4g} samples on average, where a rate of {rate:.4g} gives {samples * rate:.4g}"
    if rate == 1 or not mean:
        return
    spread = math.sqrt(samples * rate * (1 - rate))
    # Σ(size − mean)² over the variance is about chi-square.
    dispersion = sum((size - mean) ** 2 for size in sizes) / spread**2
    chi_square = stats.chi2(len(sizes) - 1)
    if min(chi_square.cdf(dispersion), chi_square.sf(dispersion)) < UNLIKELY:
        found = math.sqrt(sum((size - mean) ** 2 for size in sizes) / (len(sizes) - 1))
        yield f"the sizes of its batches vary by ±{found:.2g} around {mean:.4g}, where draws vary by ±{spread:.2g}"
    if knows_samples:
        shared = sum(len(set(one) & set(other)) for one, other in pairwise(draws))
        expected = (len(draws) - 1) * samples * rate**2
        if stats.poisson.cdf(shared, expected) < UNLIKELY:
            yield f"{shared} times a sample is in two batches in a row, where that comes about {expected:.3g} times"
