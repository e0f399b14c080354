"""Several rows for each sample: exact against the mean over a sample's rows, counted once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpscope.errors import UserError
from dpscope.flash import FlashEngine, PrivacyEngine, run_oracle
from tests.unit.flash.agreement import one_loss
from tests.unit.flash.checkpointed_models import CheckpointedDecoder
from tests.unit.flash.flash_models import Decoder, EveryFamily, randomised, token_batch, token_losses

EACH = 3


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.scale, self.head = nn.Parameter(torch.ones(4, 1, 1)), nn.Linear(4, 3)

    def forward(self, x):
        return self.head((self.norm(self.conv(x)) * self.scale).tanh().mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


MODELS = {
    "a decoder": (Decoder, lambda rows: token_batch(rows, 5), token_losses),
    "every family": (
        lambda: randomised(EveryFamily()),
        lambda rows: torch.randint(0, 5, (rows, 4)),
        lambda model, ids: model(ids).sin().flatten(1).sum(1),
    ),
    "images": (Images, lambda rows: torch.randn(rows, 2, 5, 5), lambda model, x: model(x).sin().sum(1)),
    "a recurrent layer": (
        Recurrent,
        lambda rows: torch.randn(rows, 5, 3),
        lambda model, x: model(x).sin().sum((1, 2)),
    ),
    "one position a row": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        lambda rows: torch.randn(rows, 3),
        lambda model, x: model(x).sin().sum(1),
    ),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_the_mean_over_the_rows_of_a_sample_is_clipped(kind: str, reduction: str, clipping: str) -> None:
    torch.manual_seed(1)
    make, make_batch, losses = MODELS[kind]
    model, batch = make().double(), make_batch(4 * EACH)
    batch = batch.double() if isinstance(batch, torch.Tensor) and batch.is_floating_point() else batch
    truth = run_oracle(
        model, batch, one_loss(losses), max_grad_norm=0.1, clipping=clipping, rows_per_sample=EACH, dtype=torch.float64
    )
    with FlashEngine(
        model, max_grad_norm=0.1, clipping=clipping, rows_per_sample=EACH, loss_reduction=reduction
    ) as engine:
        found = losses(model, batch)
        assert len(found) == 4 * EACH  # the model's own output is what it always was
        (found.mean() if reduction == "mean" else found.sum()).backward()
        engine.finish()
    assert len(engine.norms) == 4
    assert torch.allclose(engine.norms, truth.norms, rtol=1e-9)
    rounding = 1e-13 * float(truth.norms.max())  # the bias before an InstanceNorm has no gradient but that
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, truth.clipped_sums[name], rtol=1e-8, atol=rounding), name


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", MODELS)
def test_rows_of_one_user_are_clipped_as_one(kind: str, reduction: str) -> None:
    torch.manual_seed(1)
    make, make_batch, losses = MODELS[kind]
    ids = torch.tensor([7, 2, 7, 5, 2, 7, 9])
    model, batch = make().double(), make_batch(len(ids))
    batch = batch.double() if isinstance(batch, torch.Tensor) and batch.is_floating_point() else batch
    truth = run_oracle(model, batch, one_loss(losses), max_grad_norm=0.1, ids=ids, dtype=torch.float64)
    with FlashEngine(model, max_grad_norm=0.1, loss_reduction=reduction) as engine:
        for _ in range(2):
            model.zero_grad()
            found = losses(model, batch)
            engine.group_rows(ids)
            (found.mean() if reduction == "mean" else found.sum()).backward()
            engine.finish()
        assert len(engine.norms) == engine.samples == 4
        assert torch.allclose(engine.norms, truth.norms, rtol=1e-9)
        for name, parameter in model.named_parameters():
            assert torch.allclose(parameter.grad, truth.clipped_sums[name], rtol=1e-8, atol=1e-12), name
        model.zero_grad()  # rows are samples again
        losses(model, batch).sum().backward()
        engine.finish()
        assert len(engine.norms) == len(ids)


def test_ids_that_do_not_fit_are_refused() -> None:
    model = Images()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        found = model(torch.randn(4, 2, 5, 5)).sum()
        with pytest.raises(UserError, match="whole number for each row"):
            engine.group_rows(torch.zeros(4))
        engine.group_rows(torch.tensor([0, 0, 1]))
        with pytest.raises(UserError, match="3 rows were grouped"):
            found.backward()


def test_rows_that_are_no_multiple_are_refused() -> None:
    model = Images()
    with FlashEngine(model, max_grad_norm=1.0, rows_per_sample=EACH), pytest.raises(UserError, match="7 rows"):
        model(torch.randn(7, 2, 5, 5)).sum().backward()


def test_samples_that_mix_are_found_among_blocks_of_rows() -> None:
    class Mixing(Images):
        def forward(self, x):
            return super().forward(x - x.mean(0))

    model = Mixing()
    with FlashEngine(model, max_grad_norm=1.0, rows_per_sample=EACH), pytest.raises(UserError, match="mix"):
        model(torch.randn(4 * EACH, 2, 5, 5))


def test_blocks_that_run_again_have_several_rows_for_each_sample() -> None:
    torch.manual_seed(2)
    model, batch = CheckpointedDecoder().double(), token_batch(4 * EACH, 5)
    truth = run_oracle(model, batch, one_loss(token_losses), max_grad_norm=0.1, rows_per_sample=EACH)
    with FlashEngine(model, max_grad_norm=0.1, rows_per_sample=EACH, memory_budget="lean") as engine:
        for _ in range(2):
            model.zero_grad()
            token_losses(model, batch).mean().backward()
            engine.finish()
    rounding = 1e-13 * float(truth.norms.max())  # the bias before an InstanceNorm has no gradient but that
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, truth.clipped_sums[name], rtol=1e-8, atol=rounding), name


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "normalised"])
def test_physical_batches_of_views_add_up_to_the_logical_one(clipping: str) -> None:
    """BatchMemoryManager cuts samples, never the rows of one."""
    torch.manual_seed(0)
    views, labels = torch.randn(32, EACH, 4), torch.randint(0, 2, (32,))
    model = Views()
    expected = run_oracle(
        model,
        {"x": views.flatten(0, 1), "y": labels.repeat_interleave(EACH)},
        one_loss(lambda m, b: F.cross_entropy(m(b["x"]), b["y"], reduction="none")),
        max_grad_norm=0.2,
        clipping=clipping,
        rows_per_sample=EACH,
    ).clipped_sums
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(TensorDataset(views, labels), batch_size=32),
        noise_multiplier=0.0,
        max_grad_norm=0.2,
        clipping=clipping,
        poisson_sampling=False,
        rows_per_sample=EACH,
    )
    sizes = []
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=10, optimizer=optimizer) as batches:
        for x, y in batches:
            sizes.append(len(y))
            optimizer.zero_grad()
            F.cross_entropy(model(x.flatten(0, 1)), y.repeat_interleave(EACH)).backward()
            optimizer.step()
    assert max(sizes) <= 10 < sum(sizes) == 32
    for name, parameter in model.named_parameters():
        assert torch.allclose(before[name] - parameter, expected[name] / 32, atol=1e-6), name


def test_a_sample_is_counted_once_by_the_accountant() -> None:
    data = TensorDataset(torch.randn(32, EACH, 4), torch.randint(0, 2, (32,)))
    model = Views()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        rows_per_sample=EACH,
    )
    for views, labels in loader:
        optimizer.zero_grad()
        if len(labels):
            F.cross_entropy(model(views.flatten(0, 1)), labels.repeat_interleave(EACH)).backward()
            optimizer.step()
    assert optimizer.expected_batch_size == 8
    assert {rate for _, rate, _ in engine.accountant.history} == {0.25}
