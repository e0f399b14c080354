"""Sums can be read off updates of plain SGD only: detects momentum and Adam by how they move the parameters."""

from __future__ import annotations

import torch

from dpscope.audit.loop import RunningLoop, StepFailed
from dpscope.audit.samples import Samples

COLLINEAR = 1 - 1e-6
EQUAL_SPREAD = 1e-2  # relative spread of sizes that are all the same
USE_PLAIN_SGD = "for the test take torch.optim.SGD without momentum"


def require_plain_sgd(unclipped: RunningLoop, samples: Samples) -> None:
    """Raise `StepFailed` where the loop's optimizer has momentum, or moves every entry equally far (Adam)."""
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
