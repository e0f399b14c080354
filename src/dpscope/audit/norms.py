"""Steps on single samples, unclipped: their norms, and whether sums can be read off the updates at all.

They can be for plain SGD only. Momentum and Adam are recognised by how they move the parameters.
"""

from __future__ import annotations

import math
import statistics

import torch

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
    """Return the norm of the batch's sum divided by its size, which is about the norm of one sample's gradient."""
    together = samples.ordinary[:COMPANIONS]
    try:
        return unclipped.step(samples.batch(together)).norm / len(together)
    except StepFailed:
        return 0.0


def usual_clip_norm(norms: dict[int, float], samples: Samples) -> float:
    """Return a clip norm that about half of the ordinary samples exceed."""
    known = [norm for index in samples.ordinary if (norm := norms.get(index))]
    return statistics.median(known) if known else 1.0


COLLINEAR = 1 - 1e-6
EQUAL_SPREAD = 1e-2  # relative spread of sizes that are all the same
USE_PLAIN_SGD = "for the test take torch.optim.SGD without momentum"


def require_plain_sgd(unclipped: RunningLoop, samples: Samples) -> None:
    """Raise `StepFailed` if the loop's optimizer has momentum, or moves every entry equally far (Adam)."""
    batch = samples.batch(samples.ordinary[:1])
    first, second = (_flat(unclipped.step(batch).sums) for _ in range(2))
    if not (first.isfinite().all() and first.any() and second.any()):
        return
    sizes = first[first != 0].abs()
    if len(sizes) > 8 and float(sizes.std() / sizes.mean()) < EQUAL_SPREAD:
        raise StepFailed(
            f"the optimizer moves every entry equally far, as Adam does in its first step: {USE_PLAIN_SGD}"
        )
    ratio = float(second.norm() / first.norm())
    # Gradients that are not cleared make it exactly 2, which is a fault and not momentum.
    if float(torch.cosine_similarity(first, second, 0)) > COLLINEAR and 1.01 < ratio < 1.999:
        raise StepFailed(f"the optimizer goes {ratio:.3g} times as far the second time (momentum): {USE_PLAIN_SGD}")


def _flat(sums: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([total.flatten() for total in sums.values()])
