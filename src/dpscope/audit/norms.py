"""Norms of samples, read off unclipped steps on each of them alone."""

from __future__ import annotations

import math
import statistics

from dpscope.audit.loop import RunningLoop, StepFailed
from dpscope.audit.samples import Samples

UNCLIPPED = 1e12  # a clip norm that no gradient exceeds
COMPANIONS = 4  # samples in a batch for losses that compare samples


def sample_norms(unclipped: RunningLoop, samples: Samples) -> dict[int, float]:
    """Return the finite norms, by sample. An extreme sample that the loop refuses has none."""
    norms = {index: unclipped.step(samples.batch([index])).norm for index in samples.ordinary}
    for index in samples.extremes.values():
        try:
            norms[index] = unclipped.step(samples.batch([index])).norm
        except StepFailed:  # the loop could not meet such a sample
            continue
    if not any(norms[index] for index in samples.ordinary):  # a contrastive loss: zero for a sample alone
        norms.update(dict.fromkeys(samples.ordinary, _norm_in_batch(unclipped, samples)))
    return {index: norm for index, norm in norms.items() if math.isfinite(norm)}


def _norm_in_batch(unclipped: RunningLoop, samples: Samples) -> float:
    """Return the norm of the batch's sum over its size: about that of one sample's gradient in it."""
    together = samples.ordinary[:COMPANIONS]
    try:
        return unclipped.step(samples.batch(together)).norm / len(together)
    except StepFailed:
        return 0.0


def usual_clip_norm(norms: dict[int, float], samples: Samples) -> float:
    """Return a clip norm that about half of the ordinary samples exceed."""
    known = [norm for index in samples.ordinary if (norm := norms.get(index))]
    return statistics.median(known) if known else 1.0
