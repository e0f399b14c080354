"""Norms of parameters that are used twice, where the two uses cancel; and of many small ones together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpscope.flash import FlashEngine
from dpscope.flash.gradients import norms
from dpscope.flash.gradients.contributions import Kept, Lookup, Outer, Tied
from dpscope.flash.gradients.norms import TIED_FLOOR, SquaredNorms
from dpscope.flash.gradients.paths import PathRules
from dpscope.flash.step import microbatch

ROWS, WIDTH, BATCH, LENGTH = 11, 6, 3, 5


def tied_uses(share: float) -> tuple[Lookup, Outer]:
    """An embedding's gradient, and a head's that is its negative, up to `share` of it."""
    ids = torch.randint(0, ROWS, (BATCH, LENGTH))
    g = torch.randn(BATCH, LENGTH, WIDTH)
    one_hot = nn.functional.one_hot(ids, ROWS).float()
    rules = PathRules("gram")
    head = one_hot * (share - 1)
    outer = Outer(g, head, rules.of_product(g.shape, head))
    return Lookup(ids, g, ROWS, None, rules.of_lookup(*ids.shape)), outer


def norm_of(parts: tuple[Lookup, Outer]) -> torch.Tensor:
    total = SquaredNorms(1, BATCH, torch.device("cpu"))
    total.add_part(0, Tied(*parts))
    return total.result()[0].sqrt()


def true_norm(parts: tuple[Lookup, Outer]) -> torch.Tensor:
    lookup, outer = parts
    values = lookup.materialise().double() + torch.bmm(outer.g.double().transpose(1, 2), outer.x.double())
    return values.flatten(1).norm(dim=1)


@pytest.mark.parametrize("share", [0.0, 1e-7, 1e-3])
def test_uses_that_cancel_are_never_taken_for_smaller_than_they_are(share: float) -> None:
    parts = tied_uses(share)
    assert (norm_of(parts) >= true_norm(parts) * (1 - 1e-3)).all()
    assert (norm_of(parts) > 0).all()  # a factor of 1 for a sample nobody knows the norm of would be a leak


def test_uses_that_do_not_cancel_are_exact() -> None:
    parts = tied_uses(0.9)
    assert ((true_norm(parts) / norm_of(parts) - 1).abs() < 1e-6).all()
    assert TIED_FLOOR < 0.9**2 / 2


def test_sums_of_half_precision_parameters_stay_wide_until_noise_is_added() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).bfloat16()
    with FlashEngine(model, max_grad_norm=0.1) as engine:
        model(torch.randn(3, 5, 4).bfloat16()).float().square().mean().backward()
        assert {total.dtype for _, total in engine.clipped_sums()} == {torch.float32}
        model(torch.randn(3, 5, 4).bfloat16()).float().square().mean().backward()
        engine.finish()
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}


class Adapted(nn.Module):
    """A frozen layer with a trained product of rank 2 beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_adapters_take_a_product_each_as_in_ordinary_training_and_are_normed_and_summed_together(monkeypatch):
    calls = []
    for module, name in ((norms, "kept_norms_squared"), (norms, "gram_norms_squared"), (microbatch, "kept_sums")):
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, n=name, f=plain, **k: calls.append((n, len(a[0]))) or f(*a, **k))
    model = nn.Sequential(*(Adapted(16) for _ in range(5)))
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        loss = model(torch.randn(4, 24, 16)).square().mean()
        calls.clear()  # of the self-test
        with torch.profiler.profile() as profile:
            loss.backward()
        engine.finish()
    assert {row.path for row in engine.explain()} == {"keep"}
    products = [event.name for event in profile.events() if event.name in ("aten::bmm", "aten::mm")]
    assert products.count("aten::bmm") == 2 * 5  # the weights' gradients, one of each sample
    assert products.count("aten::mm") == 3 * 5 - 2  # the inputs' gradients, none of the first layer's input
    assert calls == [("kept_norms_squared", 2 * 5), ("kept_sums", 2 * 5)]


def test_norms_that_came_with_a_product_are_taken_until_its_values_change():
    """The squares are those of other values here: so it is seen whether they were taken."""
    values = torch.randn(3, 4, 5)
    kept = Kept(values, squares=torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64))
    known = torch.tensor([3.0, 7.0, 11.0], dtype=torch.float64)
    for add in (lambda norms: norms.add_all([kept], [0]), lambda norms: norms.add_part(0, kept)):
        norms = SquaredNorms(1, 3, torch.device("cpu"))
        add(norms)
        norms.add_all([Kept(torch.ones(3, 2))], [0])
        torch.testing.assert_close(norms.result()[0], known + 2)
    torch.testing.assert_close(kept.norms_squared(), known)
    assert kept.absorb(Kept(torch.ones(3, 4, 5)), torch.float32)
    norms = SquaredNorms(1, 3, torch.device("cpu"))
    norms.add_all([kept], [0])
    true = values.double().square().flatten(1).sum(1)
    torch.testing.assert_close(norms.result()[0], true)
    torch.testing.assert_close(kept.norms_squared(), true)
