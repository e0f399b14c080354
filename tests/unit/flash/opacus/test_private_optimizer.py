"""Options of the private optimizer: DP-AdamBC."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dpscope.errors import UserError
from tests.unit.flash.private_training import make_data, make_model, make_private


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_bc_takes_the_variance_of_the_noise_out_of_the_second_moment(kind: type[torch.optim.Optimizer]) -> None:
    """One step, against the private gradient of the same noise."""
    moved = {}
    for bc in (None, 1e-6):
        model = make_model()
        before = [p.detach().clone() for p in model.parameters()]
        generator = torch.Generator().manual_seed(3)
        options = {"noise_generator": generator, "noise_multiplier": 0.5, **({} if bc is None else {"adam_bc": bc})}
        private, optimizer, _ = make_private(model, kind(model.parameters(), lr=1.0, weight_decay=0.0), **options)
        x, y = make_data()[:8]
        F.cross_entropy(private(x), y).backward()
        std = optimizer._privatisation().noise_std * optimizer._privatisation().grad_scale
        optimizer.step()
        moved[bc] = [a - b.detach() for a, b in zip(before, model.parameters(), strict=True)]
        moments = [optimizer.state[p]["exp_avg"] / 0.1 for p in model.parameters()]
    assert std > 0
    for plain, corrected, g in zip(moved[None], moved[1e-6], moments, strict=True):
        torch.testing.assert_close(plain, g / (g.abs() + 1e-8), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(corrected, g / (g**2 - std**2).clamp(min=1e-6).sqrt(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), {"adam_bc": 1e-8}, "corrects Adam and AdamW"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), {"adam_bc": 1e-8}, "without amsgrad"),
        (torch.optim.Adam, {"adam_bc": 0.0}, "finite number above 0"),
        (torch.optim.Adam, {"adam_bc": 1e-8, "fused": False}, "needs the fused update"),
    ],
)
def test_adam_bc_is_refused_where_it_cannot_be_had(make, options, sentence) -> None:
    model = make_model()
    with pytest.raises(UserError, match=sentence):
        make_private(model, make(model.parameters()), **options)


def test_adam_bc_is_refused_where_torch_would_update() -> None:
    model = make_model()
    private, optimizer, _ = make_private(model, torch.optim.Adam(model.parameters()), adam_bc=1e-8)
    x, y = make_data()[:8]
    F.cross_entropy(private(x), y).backward()
    with pytest.raises(UserError, match="call step"):
        optimizer.pre_step()
