"""How near the oracle a random model has to be."""

from __future__ import annotations

import torch
from torch import nn

from dpscope.flash import FlashEngine, OracleResult
from tests.unit.flash.agreement import distance, whole_size

# A misread sample moves sums and norms by per cents. Rounding does not come near these, even where a random model's
# gradient cancels (a sum right after a normalisation); how exact the engine is, layer by layer, other tests hold.
TOLERANCES = {torch.float32: 3e-3, torch.float64: 1e-7}
VANISHING = {torch.float32: 1e-4, torch.float64: 1e-12}  # norms of a gradient that is rounding and nothing else
NOISE_MARGIN = 4.0  # times what ordinary autograd in the model's own dtype errs, at a kink or where a gradient cancels
SMALL = 1e-2  # a parameter or a norm below this share of the whole is held against that share


def assert_close(
    model: nn.Module,
    dtype: torch.dtype,
    engine: FlashEngine,
    truth: OracleResult,
    noisy: OracleResult,
    *,
    norms: bool = True,
) -> None:
    """Hold p.grad, and the engine's norms of the last micro-batch, against the oracle's."""
    tolerance, whole = TOLERANCES[dtype], whole_size(truth)
    if not float(truth.norms.min()) >= VANISHING[dtype] or not noisy.norms.isfinite().all():
        return
    named = dict(model.named_parameters())
    for name, total in truth.clipped_sums.items():
        noise = NOISE_MARGIN * distance(noisy.clipped_sums[name], total)
        allowed = tolerance * max(float(total.norm()), SMALL * whole) + noise
        found = named[name].grad
        error = distance(torch.zeros_like(total) if found is None else found, total)
        assert error <= allowed, f"{name}: error {error:.1e} of {total.norm():.1e}, allowed {allowed:.1e}"
    if not norms:
        return
    assert engine.norms is not None
    errors, noise = ((each.double().cpu() - truth.norms).abs() for each in (engine.norms, noisy.norms))
    allowed = tolerance * truth.norms.clamp(min=SMALL * float(truth.norms.max())) + NOISE_MARGIN * noise
    assert bool((errors <= allowed).all()), f"norms: {errors.tolist()}, allowed {allowed.tolist()}"
