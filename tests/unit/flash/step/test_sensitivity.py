"""The privacy contract itself: what one sample can do to the clipped sum, whatever that sample is."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.flash_models import Decoder, EveryFamily, token_batch
from tests.unit.flash.rounded_products import round_products

SLACK = 1e-3  # the contract's, in every dtype
PATHS = (None, "gram", "direct", "keep")
# Inputs from vanishing to overflowing: the loss passes them on, so gradients are as extreme.
ADVERSARIAL = [0.0, 1e-30, 1e-12, 1.0, 1e4, 1e9, 1e18, 1e30, float("inf"), -float("inf"), float("nan")]

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:Mismatch dtype")


class Net(nn.Module):
    """Linear, convolution, norm and a bias on everything; the output grows without bound with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.conv = nn.Linear(6, 8), nn.Conv1d(4, 5, 3, padding=1)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(x).relu_()
        h = self.conv(h)
        return self.head(self.norm(h) + 0.1 * h)


class CheckpointedNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().flatten(1).sum(1)


def clipped_sums(
    model: nn.Module,
    *batches: Tensor,
    c: float,
    path: str | None,
    half: bool,
    reduction: str = "sum",
    times: float = 1.0,
    budget: str | None = None,
) -> Iterator[Tensor]:
    """All parameters' clipped sums of each batch, as one vector, and a check that it is finite."""
    with FlashEngine(model, max_grad_norm=c, path=path, loss_reduction=reduction, memory_budget=budget) as engine:
        for x in batches:
            engine.zero_grad()
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                found = losses(model, x)
            ((found.sum() if reduction == "sum" else found.mean()) * times).backward()
            engine.finish()
            total = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()
            assert total.isfinite().all()
            yield total


def clipped_sum(model: nn.Module, x: Tensor, **options: Any) -> Tensor:
    (total,) = clipped_sums(model, x, **options)
    return total


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    values=st.lists(st.sampled_from(ADVERSARIAL), min_size=2, max_size=5),
    other=st.sampled_from(ADVERSARIAL),
    log_c=st.integers(-3, 3),
    ones=st.booleans(),
)
def test_one_sample_moves_the_sum_by_no_more_than_its_bound(half, path, seed, values, other, log_c, ones):
    torch.manual_seed(seed)
    model, c = Net(), 10.0**log_c
    shape = (len(values), 4, 6)
    # Constant samples are the worst for rounding: all elements err in the same direction.
    x = (torch.ones(shape) if ones else torch.randn(shape)) * torch.tensor(values).view(-1, 1, 1)
    b = seed % len(values)
    swapped, gone = x.clone(), x.clone()
    swapped[b] = torch.randn(4, 6) * other
    gone[b] = float("nan")
    whole, other_sum, rest = clipped_sums(model, x, swapped, gone, c=c, path=path, half=half)
    assert (whole - other_sum).norm() <= 2 * c * (1 + SLACK)
    # A sample that is not finite has no share: this is removal with everything else bit for bit as it was.
    assert (whole - rest).norm() <= c * (1 + SLACK)
    if not half:  # in bfloat16 a batch of another size rounds the other samples differently
        kept = torch.arange(len(values)) != b
        removed = clipped_sum(model, x[kept], c=c, path=path, half=half)
        assert (whole - removed).norm() <= c * (1 + SLACK)
        torch.testing.assert_close(rest, removed, rtol=1e-4, atol=1e-5 * c)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_language_models_samples_are_bounded(half, reduction, tied, batch):
    model, c = Decoder(tied=tied, width=16), 0.25
    ids = token_batch(batch, 8)["ids"]
    ids[0] = 3  # one token repeated: its embedding row gathers everything
    total = clipped_sum(model, ids, c=c, path=None, half=half, reduction=reduction)
    assert total.norm() <= batch * c * (1 + SLACK)
    alone = clipped_sum(model, ids[:1], c=c, path="gram", half=half, reduction=reduction)
    assert alone.norm() <= c * (1 + SLACK)
    assert alone.norm() >= c * (1 - 2**-6)  # it was clipped, not lost


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_every_family_together_is_bounded(half):
    model, c = EveryFamily(), 0.1
    alone = clipped_sum(model, torch.randint(0, 5, (1, 4)), c=c, path=None, half=half)
    assert c * (1 - 2**-6) <= alone.norm() <= c * (1 + SLACK)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("poison", [float("inf"), -float("inf"), float("nan")])
def test_samples_that_are_not_finite_are_left_out_and_counted(path, poison):
    model, x = Net(), torch.randn(5, 4, 6)
    x[1, 2, 3] = poison
    x[4, 0, 0] = poison
    with FlashEngine(model, max_grad_norm=1.0, path=path, loss_reduction="sum") as engine:
        for _ in range(2):
            losses(model, x).sum().backward()
            engine.finish()
        assert engine.nonfinite_samples.item() == 4
        assert engine.factors[[1, 4]].tolist() == [0.0, 0.0]
        assert (engine.factors[[0, 2, 3]] > 0).all()
        assert engine.samples == 10
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()
    clean = clipped_sum(model, x[[0, 2, 3]], c=1.0, path=path, half=False)
    torch.testing.assert_close(found, 2 * clean, rtol=1e-4, atol=1e-6)


def test_a_zero_gradient_is_no_division_by_zero():
    model = Net()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        (0.0 * losses(model, torch.randn(3, 4, 6))).mean().backward()
        engine.finish()
    assert engine.norms.tolist() == [0.0] * 3
    assert engine.factors.tolist() == [1.0] * 3
    assert all(parameter.grad.count_nonzero() == 0 for parameter in model.parameters())


def test_fp16_overflow_under_a_loss_scale_drops_the_sample_alone():
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(3, 4)
    x[1] *= 1e4
    with FlashEngine(model, max_grad_norm=1.0, loss_reduction="sum", loss_scale=2.0**10) as engine:
        with torch.autocast("cpu", torch.float16):
            found = model(x).float().square().sum(1)
        (found.sum() * 2.0**10).backward()
        engine.finish()
    assert engine.factors[1] == 0.0
    assert (engine.factors[[0, 2]] > 0).all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("length", [3, 5, 7, 11])
def test_bfloat16_norms_are_those_of_the_very_values_that_are_summed(path, batch, length):
    """Equal elements that round in one direction: a norm of rounded gradients beside a sum of exact ones shows."""
    model, c = nn.Sequential(nn.Linear(8, 8, bias=False)), 1e-3
    x = torch.full((batch, length, 8), 1.0078125)  # Σ_t x_t g_t is no bfloat16 number
    with FlashEngine(model, max_grad_norm=c, path=path, loss_reduction="sum") as engine:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        (output * 1.0078125).float().sum().backward()
        engine.finish()
    assert model[0].weight.grad.norm() == pytest.approx(batch * c, rel=1e-5)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_whether_a_huge_sample_has_a_share_does_not_depend_on_its_batch(path, batch, reduction):
    """A gradient that is too large to be scaled down in float32: dropped on all paths, alone or in company."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    x = torch.ones(batch, 3, 4)
    x[0] = 1e33
    with FlashEngine(model, max_grad_norm=1.0, path=path, loss_reduction=reduction) as engine:
        output = model(x).flatten(1).sum(1)
        (output.mean() if reduction == "mean" else output.sum()).backward()
        engine.finish()
    assert engine.factors.tolist() == [0.0, *engine.factors[1:].tolist()]
    assert (engine.factors[1:] > 0).all()
    assert engine.nonfinite_samples.item() == 1


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("scale", [1e-25, 1e-20, 1e17, 1e22])
def test_gradients_of_any_size_are_clipped_as_those_of_ordinary_size(tied, path, batch, scale):
    """The loss is multiplied by hand, and C with it: the clipped sum is that of the plain loss, times the same."""
    model, ids = Decoder(tied=tied), token_batch(batch, 7)["ids"]
    c = 0.05
    plain = clipped_sum(model, ids, c=c, path=path, half=False, reduction="sum")
    scaled = clipped_sum(model, ids, c=c * scale, path=path, half=False, reduction="sum", times=scale)
    torch.testing.assert_close(scaled / scale, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scale", [1e-25, 1e17])
def test_a_loss_scale_the_engine_knows_changes_nothing(path, scale):
    model, x = Net(), torch.randn(4, 4, 6)
    plain = clipped_sum(model, x, c=0.5, path=path, half=False, reduction="sum")
    model.zero_grad()
    with FlashEngine(model, max_grad_norm=0.5, path=path, loss_reduction="sum", loss_scale=scale) as engine:
        (losses(model, x).sum() * scale).backward()
        engine.finish()
    assert engine.nonfinite_samples.item() == 0
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).double()
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-6)


# -- TF32 --------------------------------------------------------------------------------------------------------------


def cancelling_sample(length: int, width: int, out: int) -> tuple[Tensor, Tensor]:
    """x and g whose positions cancel in pairs but for 1/1000 of x: rounding an operand moves the rest a great deal."""
    x, g = (
        torch.randn(length // 2, width).repeat_interleave(2, 0),
        torch.randn(length // 2, out).repeat_interleave(2, 0),
    )
    sizes = torch.rand(length // 2, 1) + 0.5  # else c·g and -c·g would be rounded alike
    x[1::2] *= 1.001 / sizes
    g[1::2] *= -sizes
    return x, g


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_where_products_are_rounded_a_sample_that_cancels_has_no_more_than_its_share(path, room, seed, monkeypatch):
    torch.manual_seed(seed)
    round_products(monkeypatch)
    model, c = nn.Sequential(nn.Linear(24, 40, bias=False)), 1e-3
    x, g = cancelling_sample(12, 24, 40)
    x, g = torch.stack([x, torch.zeros_like(x)]), torch.stack([g, torch.zeros_like(g)])
    with FlashEngine(model, max_grad_norm=c, path=path, loss_reduction="sum") as engine:
        engine.path_rules.budget.fits = lambda more: room
        (model(x) * g).sum().backward()
        engine.finish()
        assert engine.explain()[0].path == (path or ("keep" if room else engine.explain()[0].path))
    assert model[0].weight.grad.double().norm() == pytest.approx(c, rel=SLACK)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["tf32", "bf16"])
def test_products_of_half_precision_operands_are_normed_as_rounded_as_they_are_summed(kind, dtype, path, monkeypatch):
    """float16 holds more than bfloat16, to which a CPU may round what it multiplies in float32."""
    torch.manual_seed(0)
    round_products(monkeypatch, kind)
    model, c = nn.Sequential(nn.Linear(24, 40, bias=False)), 1e-3
    x, g = cancelling_sample(12, 24, 40)
    x[1::2] *= 1.02
    with FlashEngine(model, max_grad_norm=c, path=path, loss_reduction="sum") as engine:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            output = model(torch.stack([x, torch.zeros_like(x)]))
        (output[0] * g.to(output.dtype)).float().sum().backward()
        engine.finish()
    assert model[0].weight.grad.double().norm() == pytest.approx(c, rel=SLACK)


class CheckpointedLinear(nn.Module):
    def __init__(self, d: int, p: int, *, bias: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(d, p, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("layer", "budget"), [(nn.Linear, None), (partial(nn.Conv1d, kernel_size=1), None), (CheckpointedLinear, "lean")]
)
@pytest.mark.parametrize("begins", [True, False], ids=["begins", "ends"])
def test_rounding_that_begins_or_ends_between_backward_and_step_gives_no_sample_more(layer, budget, path, begins):
    torch.manual_seed(0)
    model, c = nn.Sequential(layer(24, 40, bias=False)), 1e-3
    x, g = (torch.stack([each, torch.zeros_like(each)]) for each in cancelling_sample(12, 24, 40))
    if layer is not nn.Linear and budget is None:
        x, g = x.mT.contiguous(), g.mT.contiguous()
    with (
        pytest.MonkeyPatch.context() as rounding,
        FlashEngine(model, max_grad_norm=c, path=path, loss_reduction="sum", memory_budget=budget) as engine,
    ):
        if not begins:
            round_products(rounding)
        (model(x.requires_grad_()) * g).sum().backward()
        rounding.undo()
        if begins:
            round_products(rounding)
        if budget is not None:  # the norms were taken in backward
            with pytest.raises(UserError, match=r"precision of float32 products.*was changed"):
                engine.finish()
            return
        engine.finish()
    (weight,) = model.parameters()
    assert weight.grad.double().norm() <= c * (1 + SLACK)


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_where_products_are_rounded_a_head_tied_to_its_embedding_stays_bounded(length, path, half, monkeypatch):
    round_products(monkeypatch)
    model, c = Decoder(tied=True, width=16), 1e-3
    total = clipped_sum(model, token_batch(3, length)["ids"], c=c, path=path, half=half)
    assert total.norm() <= 3 * c * (1 + SLACK)
    alone = clipped_sum(model, token_batch(2, length)["ids"][:1].expand(2, length), c=c, path=path, half=half)
    assert alone.norm() == pytest.approx(2 * c, rel=SLACK)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    values=st.lists(st.sampled_from(ADVERSARIAL), min_size=2, max_size=5),
    log_c=st.integers(-3, 3),
)
def test_one_sample_moves_the_sum_of_a_recomputed_block_by_no_more_than_its_bound(half, seed, values, log_c):
    torch.manual_seed(seed)
    model, c, b = CheckpointedNet(), 10.0**log_c, seed % len(values)
    x = torch.randn(len(values), 4, 6) * torch.tensor(values).view(-1, 1, 1)
    gone = x.clone()
    gone[b] = float("nan")
    whole, rest = clipped_sums(model, x, gone, c=c, path=None, half=half, budget="lean")
    assert (whole - rest).norm() <= c * (1 + SLACK)


def test_a_precision_that_changes_between_norms_and_sums_is_refused(monkeypatch):
    model, x = nn.Sequential(nn.Linear(6, 5)), torch.randn(3, 4, 6)
    with FlashEngine(model, max_grad_norm=0.1) as engine:
        model(x).square().mean().backward()
        sums = engine.clipped_sums()
        round_products(monkeypatch)
        with pytest.raises(UserError, match="changed between the norms of a micro-batch and its clipped sums"):
            dict(sums)
