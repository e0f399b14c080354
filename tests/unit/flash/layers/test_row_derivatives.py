"""Derivatives of standardised and normalised weights: those of autograd, or found not to be of that form."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.flash import FlashEngine
from dpscope.flash.layers import row_derivatives
from dpscope.flash.layers.row_derivatives import RowForm, Weight, directions_of, find_forms, measure, squares_of
from tests.unit.flash.agreement import assert_exact


def standardised(w: Tensor) -> Tensor:
    flat = w.flatten(1)
    return ((flat - flat.mean(1, keepdim=True)) / (flat.std(1, keepdim=True) + 1e-5)).view_as(w)


def by_batch_norm(w: Tensor) -> Tensor:
    """As timm does it."""
    rows = w.reshape(1, len(w), -1)
    return F.batch_norm(rows, None, None, w.new_full((len(w),), 0.3), training=True, eps=1e-3).reshape_as(w)


def by_variance(w: Tensor) -> Tensor:
    variance, mean = torch.var_mean(w, dim=[1, 2, 3], keepdim=True, unbiased=False)
    return (w - mean) / torch.sqrt(variance + 1e-10)


FITTING = {
    "standardised": standardised,
    "by batch_norm": by_batch_norm,
    "by variance": by_variance,
    "normalised": lambda w: F.normalize(w.flatten(1)).view_as(w),
    "centred": lambda w: w - w.mean((1, 2, 3), keepdim=True),
    "scaled": lambda w: 3 * w,
}
OTHERS = {
    "masked": lambda w: w * (torch.arange(w.numel()).view_as(w) % 3 > 0),
    "squashed": torch.tanh,
    "softmax": lambda w: w.flatten(1).softmax(1).view_as(w),
    "normalised as a whole": lambda w: w / w.norm(),
    "columns": lambda w: w / w.norm(dim=0),
    "turned": lambda w: w.flip(3),
}


def form_of(q: Tensor, w: Tensor) -> tuple[RowForm, Tensor]:
    return form_of_one(Weight(q, w, None, directions_of(w)))


def form_of_one(weight: Weight) -> tuple[RowForm, Tensor]:
    (found,) = measure([weight])
    find_forms([found])
    return found.form, found.fits


def autograds(q: Tensor, w: Tensor, rows: Tensor) -> Tensor:
    return torch.stack([torch.autograd.grad(q, w, row, retain_graph=True)[0] for row in rows])


@pytest.mark.parametrize("name", FITTING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_those_of_autograd(name, dtype):
    torch.manual_seed(0)
    w = torch.randn(6, 5, 3, 3, dtype=dtype).add_(0.3).requires_grad_()
    q, rows = FITTING[name](w), torch.randn(7, 6, 5, 3, 3, dtype=dtype)
    before = torch.get_rng_state()
    form, fits = form_of(q, w)
    found = form.applied(rows)
    assert fits.all()
    torch.testing.assert_close(found, autograds(q, w, rows), rtol=1e-5, atol=1e-5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", FITTING)
def test_norms_come_from_squares_and_products_with_the_basis(name):
    torch.manual_seed(0)
    w = torch.randn(6, 5, 3, 3, dtype=torch.float64).add_(0.3).requires_grad_()
    q, rows = FITTING[name](w), torch.randn(7, 6, 5, 3, 3, dtype=torch.float64)
    form, _ = form_of(q, w)
    flat = rows.flatten(2)
    products = torch.stack([flat.square().sum(2), *((flat * e).sum(2) for e in form.basis.unbind(1))], 1)
    exact = autograds(q, w, rows).flatten(1).square().sum(1)
    torch.testing.assert_close(squares_of(form.scale, form.inner, products).sum(1), exact, rtol=1e-9, atol=0)
    inside = form.basis[:, 1].expand(7, -1, -1)  # nothing of it is outside of the basis: never below the truth
    products = torch.stack([torch.ones(7, 6), torch.zeros(7, 6), torch.ones(7, 6)], 1).double()
    exact = autograds(q, w, inside.reshape(rows.shape)).flatten(1).square().sum(1)
    assert (squares_of(form.scale, form.inner, products).sum(1) >= exact * (1 - 1e-9)).all()


@pytest.mark.parametrize("name", OTHERS)
def test_another_derivative_is_found_out_and_gives_no_numbers(name):
    torch.manual_seed(0)
    w = torch.randn(6, 5, 3, 3, requires_grad=True)
    q = OTHERS[name](w)
    form, fits = form_of(q, w)
    assert not fits.any()
    assert form.applied(torch.randn(2, 6, 5, 3, 3)).isnan().all()


def test_weights_are_measured_together_as_they_are_alone():
    """Rows of three lengths, with gains and without, and an operator that vmap has no rule for."""
    torch.manual_seed(0)
    shapes, names = [(6, 5, 3, 3), (4, 45), (8, 2, 3, 3), (3, 5, 9), (5, 13)], ["standardised", "normalised", "masked"]
    weights = [torch.randn(shape, requires_grad=True) for shape in shapes]
    gains = [torch.rand(len(w), *[1] * (w.dim() - 1), requires_grad=True) for w in weights]
    gains[::2] = [None] * 3
    qs = [(FITTING | OTHERS)[names[at % 3]](w) for at, w in enumerate(weights)]
    qs = [q if gain is None else q * gain for q, gain in zip(qs, gains, strict=True)]
    qs[0] = OnlyOneByOne.apply(qs[0])
    given = [Weight(*each, directions_of(each[1])) for each in zip(qs, weights, gains, strict=True)]
    parts = measure(given)
    find_forms(parts)
    assert sorted(len(part.sizes) for part in parts) == [1, 1, 1, 2]
    for part in parts:
        each = zip(part.weights, *(numbers.split(part.sizes) for numbers in (part.fits, *part.form)), strict=True)
        for weight, fits, *together in each:
            alone, _ = form_of_one(weight)
            (name,) = (names[at % 3] for at, w in enumerate(weights) if w is weight.w)
            assert bool(fits.all()) == (name != "masked")
            torch.testing.assert_close(together, list(alone), rtol=1e-4, atol=1e-5, equal_nan=True)


class OnlyOneByOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w.clone()

    @staticmethod
    def backward(ctx, g):
        return torch.from_numpy(g.numpy().copy())


class Standardised(nn.Conv2d):
    def __init__(self, derive) -> None:
        super().__init__(3, 4, 3)
        self.derive, self.gain = derive, nn.Parameter(torch.rand(4, 1, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.gain * self.derive(self.weight), self.bias)


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).tanh().flatten(1).sum(1)


@pytest.mark.parametrize("name", ["standardised", "by batch_norm", "masked"])
def test_a_convolution_of_a_derived_weight_is_exact(name, monkeypatch):
    pulled, vjp = [], row_derivatives._vjp

    def counted(q, parameters, rows, **options):
        pulled.append(len(rows))
        return vjp(q, parameters, rows, **options)

    monkeypatch.setattr(row_derivatives, "_vjp", counted)
    model = nn.Sequential(nn.Conv2d(2, 3, 1), Standardised((FITTING | OTHERS)[name]))
    x = {"x": torch.randn(7, 2, 5, 5)}
    assert_exact(model, x, losses)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for _ in range(2):
            pulled.clear()
            model.zero_grad()
            losses(model, x).mean().backward()
            engine.finish()
    assert pulled == [7]  # of a masked weight, or of the gain


def test_directions_are_torchs_own_where_a_user_replaces_its_function(monkeypatch):
    w, own = torch.randn(4, 3, 3, 3), F.layer_norm
    expected = directions_of(w)
    monkeypatch.setattr(F, "layer_norm", lambda *args, **kwargs: own(*args, **kwargs).sin())
    assert torch.equal(directions_of(w), expected)


def test_a_clamp_that_begins_to_bite_is_seen_at_once():
    """A weight inside its bounds has the identity for a derivative, until it reaches them."""
    model, x = nn.Sequential(Standardised(lambda w: w.clamp(-1, 1))), {"x": torch.randn(7, 3, 5, 5)}
    with FlashEngine(model, max_grad_norm=1e9, loss_reduction="sum") as engine:
        for scale in (0.1, 1.0, 100.0):
            with torch.no_grad():
                model[0].weight.mul_(scale)
            plain = Standardised(model[0].derive)
            plain.load_state_dict(model[0].state_dict())
            losses(plain, x).sum().backward()
            model.zero_grad()
            losses(model, x).sum().backward()
            engine.finish()
            torch.testing.assert_close(model[0].weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-4)
