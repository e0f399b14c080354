"""The search for the largest batch that fits: of a plan, and of a training loop on the GPU at hand.

Peaks are nearly lines in the batch size, so a few trials suffice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

CLOSE = 0.02  # between a batch that fits and one that does not
CLEARLY = 0.02  # beyond the limit: nothing is tried there
MOST_TRIALS = 12
FARTHEST = 16  # times the largest batch that fits, to the next one that is tried


def search_batch(peak_of: Callable[[int], int | None], limit: int, most: int) -> tuple[int, int]:
    """Find the largest batch that fits.

    Args:
        peak_of: Returns the peak of a batch in bytes; None if it does not fit.
        limit: Bytes that may be used.
        most: The largest batch to look for.

    Returns:
        The batch, 0 if not even one sample fits, and a larger one that does not fit; `most + 1` if `most` fits.
    """
    peaks: dict[int, int] = {}
    failing = most + 1
    for _ in range(MOST_TRIALS):
        batch = max(peaks, default=0)
        if batch >= most or failing - batch <= close_to(batch):
            break
        guess = _guess(peaks, failing, limit, most)
        if guess <= batch:
            break
        peak = peak_of(guess)
        if peak is None:
            failing = guess
        else:
            peaks[guess] = peak
    return max(peaks, default=0), failing


def close_to(batch: int) -> int:
    """Return how far a batch that does not fit may be above one that fits."""
    return max(1, int(CLOSE * batch))


def _guess(peaks: Mapping[int, int], failing: int, limit: int, most: int) -> int:
    """Return where the line through the two largest batches that fit reaches the limit, between the bounds.

    At small batches another phase may set the peak, so no step towards the limit is too large. If one more sample is
    clearly beyond the limit, the batch before it is the answer.
    """
    if not peaks:
        return 1 if failing > 1 else 0
    *smaller, batch = sorted(peaks)
    if not smaller:
        return 4 if failing > 4 else (batch + failing) // 2
    slope = (peaks[batch] - peaks[smaller[-1]]) / (batch - smaller[-1])
    reached = batch + (limit - peaks[batch]) / slope if slope > 0 else math.inf
    if peaks[batch] + slope > (1 + CLEARLY) * limit and failing <= most:
        return batch
    if reached >= failing and failing <= most:
        # A step reserves somewhat more than it holds, so that the line's end itself often fails.
        far = failing > 2 * batch
        reached = math.sqrt(batch * failing) if far else batch + 0.8 * (failing - batch)
    return max(batch + 1, int(min(reached, FARTHEST * batch, failing - 1)))
