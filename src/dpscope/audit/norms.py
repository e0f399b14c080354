"""Norms of samples, read off steps on each of them alone that clip nothing."""

from __future__ import annotations

import math
import statistics

from dpscope.audit.loop import CouldNotStep, RunningLoop
from dpscope.audit.samples import Samples

UNCLIPPED = 1e12  # a clip norm that no gradient exceeds


COMPANY = 4


def sample_norms(unclipped: RunningLoop, samples: Samples) -> dict[int, float]:
    """By sample, where it is finite. An extreme sample that the loop refuses has none."""
    norms = {index: unclipped.step(samples.batch([index])).norm for index in samples.ordinary}
    for index in samples.extremes.values():
        try:
            norms[index] = unclipped.step(samples.batch([index])).norm
        except CouldNotStep:  # it is not one that the loop could meet
            continue
    if not any(norms[index] for index in samples.ordinary):  # a loss that needs company: contrastive
        norms.update(dict.fromkeys(samples.ordinary, _norm_in_company(unclipped, samples)))
    return {index: norm for index, norm in norms.items() if math.isfinite(norm)}


def _norm_in_company(unclipped: RunningLoop, samples: Samples) -> float:
    """About that of a sample's gradient in a batch."""
    together = samples.ordinary[:COMPANY]
    try:
        return unclipped.step(samples.batch(together)).norm / len(together)
    except CouldNotStep:
        return 0.0


def usual_clip_norm(norms: dict[int, float], samples: Samples) -> float:
    """One that about half of the ordinary samples exceed."""
    known = [norm for index in samples.ordinary if (norm := norms.get(index))]
    return statistics.median(known) if known else 1.0
