"""Several rows for each sample: exact against the mean over a sample's rows, counted once."""

from __future__ import annotations

import numpy
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


@pytest.mark.parametrize("kind", [list, numpy.array])
def test_ids_may_be_a_list_or_an_array(kind) -> None:
    model = Images()
    with FlashEngine(model) as engine:
        found = model(torch.randn(4, 2, 5, 5)).sum()
        engine.group_rows(kind([3, 1, 3, 1]))
        found.backward()
        engine.finish()
        assert len(engine.norms) == 2


def test_ids_that_do_not_fit_are_refused() -> None:
    model = Images()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        found = model(torch.randn(4, 2, 5, 5)).sum()
        for ids in (torch.zeros(4), [0.5] * 4, ["Ada", "Ada", "Bob", "Bob"]):
            with pytest.raises(UserError, match="whole number for each row"):
                engine.group_rows(ids)
        engine.group_rows(torch.tensor([]))
        with pytest.raises(UserError, match="0 rows were grouped"):
            model(torch.randn(4, 2, 5, 5)).sum().backward()
        engine.zero_grad()
        found = model(torch.randn(4, 2, 5, 5)).sum()
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


# -- samples that are in one micro-batch of a step, or in none ---------------------------------------------------------


def private_views(rows: int = 32, **options):
    model = options.pop("model", None) or Views()
    loader = DataLoader(TensorDataset(torch.randn(rows, 4)), batch_size=8)
    return PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=loader,
        **{"noise_multiplier": 0.0, "max_grad_norm": 0.2, "poisson_sampling": False, **options},
    )


def physical_batch(model, optimizer, x, ids, *, goes_on: bool) -> None:
    optimizer.signal_skip_step(goes_on)
    loss = model(x).square().sum(1).mean() if len(x) else model(x).sum()
    if ids is not None:
        optimizer.engine.group_rows(torch.tensor(ids, dtype=torch.long))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("way", ["a logical batch", "accumulation", "an engine alone"])
def test_a_user_with_rows_in_two_batches_of_a_step_is_refused(way: str) -> None:
    x = torch.randn(4, 4)
    if way == "an engine alone":
        model = Views()
        engine = FlashEngine(model, max_grad_norm=1.0)
        close = engine.finish
    else:
        model, optimizer, _ = private_views()
        engine, close = optimizer.engine, optimizer.step
    for number, ids in enumerate(([7, 5], [3, 5])):
        if way == "a logical batch":
            optimizer.signal_skip_step(number == 0)
        loss = model(x[2 * number :][:2]).sum()
        engine.group_rows(torch.tensor(ids))
        loss.backward()
        if number:
            with pytest.raises(UserError, match="sample 5 has rows in two batches of one step"):
                close()
        elif way != "accumulation":
            close()


def test_users_of_other_batches_and_of_the_next_step_are_samples_of_their_own() -> None:
    torch.manual_seed(0)
    model, optimizer, _ = private_views(loss_reduction="sum")
    x, ids = torch.randn(8, 4), [1, 1, 2, 3, 4, 4, 4, 5]
    for _ in range(2):  # the users of a step may come again in the next
        truth = run_oracle(
            model, x, one_loss(lambda m, b: m(b).square().sum(1)), max_grad_norm=0.2, ids=torch.tensor(ids)
        ).clipped_sums
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for part in (slice(0, 3), slice(3, 3), slice(3, 8)):
            optimizer.signal_skip_step(part.stop < 8)
            loss = model(x[part]).square().sum()
            optimizer.engine.group_rows(torch.tensor(ids[part], dtype=torch.long))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(before[name] - parameter, truth[name])


@pytest.mark.parametrize("clear", ["the model", "an optimizer", "by hand", "the engine"])
def test_a_loop_with_an_engine_alone_may_see_a_user_in_each_step(clear: str) -> None:
    model = Views()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for _ in range(3):
            loss = model(torch.randn(2, 4)).sum()
            engine.group_rows(torch.tensor([7, 7]))
            loss.backward()
            engine.finish()
            optimizer.step()
            if clear == "by hand":
                for parameter in model.parameters():
                    parameter.grad = None
            else:
                {"the model": model, "an optimizer": optimizer, "the engine": engine}[clear].zero_grad()


@pytest.mark.parametrize("first", [True, False])
def test_rows_that_are_grouped_in_some_batches_of_a_step_alone_are_refused(first: bool) -> None:
    model, optimizer, _ = private_views()
    physical_batch(model, optimizer, torch.randn(2, 4), [7, 7] if first else None, goes_on=True)
    with pytest.raises(UserError, match="for some batches of a step and not for others"):
        physical_batch(model, optimizer, torch.randn(2, 4), None if first else [7, 7], goes_on=False)


@pytest.mark.parametrize("poisson", [True, False])
def test_a_physical_batch_that_cuts_a_sample_is_refused(poisson: bool) -> None:
    """The rows of a loader whose items are views, not samples: BatchMemoryManager cuts them anywhere."""
    torch.manual_seed(1)
    model, optimizer, loader = private_views(rows_per_sample=EACH, poisson_sampling=poisson)
    with (
        pytest.raises(UserError, match="is no multiple of rows_per_sample=3"),
        BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as batches,
    ):
        for (x,) in batches:
            optimizer.zero_grad()
            model(x).square().sum(1).mean().backward()
            optimizer.step()


class TakesNone(Views):
    """A model that cannot take a batch of none: a sample is made up for it."""

    def forward(self, x):
        return self.inner(x.view(len(x), -1, 2).flatten(1))


@pytest.mark.parametrize("kind", [Views, TakesNone])
@pytest.mark.parametrize("budget", [None, "lean"])
@pytest.mark.parametrize("rows", ["views", "users"])
def test_an_empty_batch_is_a_step_without_samples(kind: type[Views], budget, rows: str) -> None:
    options = {"rows_per_sample": EACH} if rows == "views" else {}
    model, optimizer, _ = private_views(model=kind(), memory_budget=budget, poisson_sampling=True, **options)
    steps = []
    optimizer.attach_step_hook(lambda each: steps.append(each.engine.norms.numel()))
    for samples in (2, 0, 1, 0, 0, 2):
        before = model.inner.weight.detach().clone()
        ids = [b // EACH for b in range(samples * EACH)]
        physical_batch(model, optimizer, torch.randn(len(ids), 4), ids if rows == "users" else None, goes_on=False)
        assert torch.equal(before, model.inner.weight) == (samples == 0)
    assert steps == [2, 0, 1, 0, 0, 2]


def test_rows_of_an_empty_batch_are_not_those_of_the_next() -> None:
    model, optimizer, _ = private_views()
    physical_batch(model, optimizer, torch.randn(0, 4), [], goes_on=False)
    physical_batch(model, optimizer, torch.randn(2, 4), None, goes_on=False)
    assert optimizer.engine.norms.numel() == 2
