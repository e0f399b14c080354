"""The untouched model is asked whether its samples mix; the self-test, whose gradient is whose."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import assert_exact
from tests.unit.flash.flash_models import sine_losses

WIDTH = 6


class Divided(nn.Module):
    """Divides by the number of samples, by so little that outputs hardly show it."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.layer, self.branch, self.share = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3), share

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.share * self.branch(x / len(x))


@pytest.mark.parametrize(("dtype", "share"), [(torch.float64, 1e-6), (torch.float32, 1e-2)])
def test_a_division_by_the_number_of_samples_is_found_by_one_sample_alone(dtype, share):
    model = Divided(share).to(dtype)
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match="depends on how many samples"):
        model(torch.randn(9, WIDTH, dtype=dtype))


class MixesMany(nn.Module):
    """Mixes samples if there are more than `most`, which is more than verification tries at a time."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.layer, self.drop, self.last, self.most = nn.Linear(WIDTH, 3), nn.Dropout(0.1), nn.Linear(3, 3), most

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        return self.last(self.drop(h - h.mean(0) if len(h) > self.most else h))


@pytest.mark.parametrize("batches", [[24], [6, 24]], ids=["first", "larger"])
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_a_model_that_mixes_only_many_samples_is_refused(batches, mode):
    model = MixesMany(20).train(mode)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for batch in batches[:-1]:
            model(torch.randn(batch, WIDTH)).sum().backward()
            engine.finish()
        with pytest.raises(UserError, match="depends on how many samples"):
            model(torch.randn(batches[-1], WIDTH))


class Amplified(nn.Module):
    """Amplifies rounding: the sum of normalised numbers is zero but for it, and changes with the batch's size."""

    def __init__(self, mixed: float = 0.0) -> None:
        super().__init__()
        self.layer, self.norm, self.mixed = nn.Linear(64, 64), nn.LayerNorm(64, elementwise_affine=False), mixed

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).sum(1, keepdim=True) + self.mixed * x.mean()


def test_what_only_rounding_moves_is_not_taken_for_mixing():
    model, x = Amplified(), torch.randn(8, 64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with FlashEngine(model, max_grad_norm=1.0):
        model(x).square().mean().backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_mixing_below_the_rounding_of_a_model_is_found_in_float64():
    model = Amplified(mixed=1e-4)
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match=r"mix|how many samples"):
        model(torch.randn(8, 64))


class MixedInBackward(torch.autograd.Function):
    """Divides gradients by the norm of the whole batch."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / g.norm()


def centred(x: Tensor) -> Tensor:
    """Return x with a hook that takes the batch's mean from its gradients."""
    if x.requires_grad:
        x.register_hook(lambda g: g - g.mean(0))
    return x


class Backwards(nn.Module):
    def __init__(self, between) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(WIDTH, 4), nn.Linear(4, 3), between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(torch.tanh(self.first(x))))


@pytest.mark.parametrize("between", [MixedInBackward.apply, centred])
def test_samples_that_meet_in_backward_are_refused(between):
    model = Backwards(between)
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match="mixes samples in backward"):
        model(torch.randn(8, WIDTH))


class Remembers(nn.Module):
    """Adds a trace of the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(WIDTH, 3), None

    def forward(self, x: Tensor) -> Tensor:
        before, self.last = self.last, x.detach().mean()
        return self.layer(x if before is None else x + 1e-4 * before)


def test_a_trace_of_the_batch_before_is_found_however_small():
    model = Remembers()
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match="keeps something of its samples"):
        model(torch.randn(8, WIDTH))


class SmallTable(nn.Module):
    """Reads a table that all samples share, as a tiny share of the output: rounding of sums hides its gradients."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.register_buffer("table", torch.randn(5, WIDTH))
        self.small, self.large = nn.Linear(WIDTH, 1), nn.Linear(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.small(self.table[None]).view(-1)[x].unsqueeze(1)
        return self.large(x.unsqueeze(1).to(self.table)) + self.share * chosen


@pytest.mark.parametrize("share", [1.0, 1e-5])
def test_rows_that_are_not_the_samples_are_found_where_gradients_are_tiny(share):
    for seed in range(4):
        torch.manual_seed(seed)
        assert_exact(SmallTable(share), {"x": torch.tensor([0, 3, 1, 3])}, sine_losses)


def test_a_table_with_as_many_rows_as_samples_is_told_from_what_relates_them():
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 3)

        def forward(self, ids: Tensor, table: Tensor) -> Tensor:
            return self.layer(table[ids]).mean(1)

    model, table = Looks(), torch.randn(5, WIDTH)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for _ in range(6):
            model(torch.randint(5, (5, 5)), table).sum().backward()
            engine.finish()
            engine.zero_grad()


# -- outputs without rows ----------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """Rows beside a loss of its own, returned or left in an attribute."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.gate, self.last, self.how = nn.Linear(6, 3), nn.Linear(6, 2), how

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        self.loss = None
        if self.how == "balance":
            loss = scores.mean(0).square().sum()
        elif self.how == "chosen":
            chosen = x[:, 0] > 0
            loss = (scores.square().sum(1) * chosen).sum() / (1 + chosen.sum())
        else:
            loss = scores.square().sum(1).mean()
        if self.how == "attribute":
            self.loss = scores.mean(0).square().sum()
        return self.last(x), loss


@pytest.mark.parametrize("how", ["balance", "chosen", "attribute", "fair"])
def test_a_loss_inside_the_model_that_mixes_samples_is_not_trained_on(how):
    torch.manual_seed(0)
    model = WithLoss(how).double()
    x = torch.randn(8, 6, dtype=torch.float64)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for _ in range(2):
            rows, loss = model(x)
            rows.square().sum(1).mean().backward()  # the rows may always be trained on
            engine.finish()
            engine.zero_grad()
        rows, loss = model(x)
        total = rows.square().sum(1).mean() + (loss if model.loss is None else model.loss)
        if how == "fair":
            total.backward()
        else:
            with pytest.raises(UserError, match="mixes samples"):
                total.backward()


class ReturnsLoss(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(6, 5), nn.Linear(5, 2), how

    def forward(self, x, y):
        h = self.first(x).tanh()
        h = h - h.mean(0) if self.how == "centred" else h
        losses = F.cross_entropy(self.last(h), y, reduction="none")
        return (losses * y).sum() / y.sum() if self.how == "masked" else losses.mean()


@pytest.mark.parametrize("how", ["centred", "masked", "mean"])
def test_a_model_that_returns_its_loss_alone_is_verified_by_the_gradients_of_its_samples(how):
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.tensor([0, 1, 1, 1, 0, 1, 1, 0])
    if how == "mean":
        assert_exact(ReturnsLoss(how), {"x": x, "y": y}, lambda m, b: m(b["x"], b["y"]).unsqueeze(0))
        return
    with FlashEngine(ReturnsLoss(how), max_grad_norm=1.0) as engine, pytest.raises(UserError, match="sample"):
        engine.model(x, y).backward()


class OverTheLargest(nn.Module):
    """Only the largest sample takes part in the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x):
        return self.layer(x / x.abs().max())


def test_a_sample_that_takes_part_only_where_it_is_the_largest_is_heard():
    for seed in range(10):
        torch.manual_seed(seed)
        with FlashEngine(OverTheLargest(), max_grad_norm=1.0) as engine, pytest.raises(UserError, match="samples mix"):
            engine.model(torch.randn(32, 6))
