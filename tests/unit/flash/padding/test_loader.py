"""Private training with padded batches is the training without: the same draws, noise, accounting and weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.data import DataLoader, Dataset, TensorDataset

import dpscope
from dpscope.errors import UserError
from dpscope.flash import PrivacyEngine, pad_batch, real_rows
from dpscope.flash.step import microbatch
from tests.torch_here import takes_compiled
from tests.unit.flash.padding.padded_training import (
    CLASSES,
    MODELS,
    collate,
    train,
    trained,
)
from tests.unit.flash.private_training import clipped_mean, make_data, make_model, moved


def assert_same(one, other, rtol=2e-5):
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=rtol, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(scope="module")
def unpadded():
    """The same training without padding, by its options."""
    known = {}

    def get(model="mlp", **options):
        key = model, tuple(sorted((name, str(value)) for name, value in options.items()))
        if key not in known:
            known[key] = trained(model, **options)
        return known[key]

    return get


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [*((model, torch.optim.SGD) for model in MODELS), *((model, torch.optim.AdamW) for model in ("mlp", "blocks"))],
)
def test_weights_noise_and_epsilon_are_those_of_unpadded_training(unpadded, model, optimizer):
    plain, _, plain_engine, _ = unpadded(model, optimizer=optimizer)
    padded, padded_optimizer, engine, loader = trained(model, optimizer=optimizer, pad_batches=True)
    assert_same(plain, padded, rtol=1e-4 if optimizer is torch.optim.AdamW else 2e-5)
    assert engine.accountant.history == plain_engine.accountant.history
    assert engine.get_epsilon(1e-5) == plain_engine.get_epsilon(1e-5)
    assert padded_optimizer.expected_batch_size == 8
    assert 0 < padded_optimizer.padding_share < 0.3 and 0 < loader.sizes.expected_share < 0.1
    assert set(padded_optimizer.engine.padding.sizes) <= set(loader.sizes.sizes)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"pad_batches": 5}, id="batches of one size"),
        pytest.param({"pad_batches": [2, 9]}, id="sizes of one's own"),
        pytest.param({"pad_batches": 64}, id="one batch a draw"),
        pytest.param({"pad_batches": True, "physical": 3}, id="BatchMemoryManager"),
        pytest.param({"pad_batches": 6, "physical": 3}, id="BatchMemoryManager of half a size"),
        pytest.param({"pad_batches": True, "ahead": True}, id="fetched ahead"),
        pytest.param({"pad_batches": True, "num_workers": 2}, id="workers", marks=pytest.mark.slow),
        pytest.param({"pad_batches": True, "fused": True}, id="fused update"),
    ],
)
def test_however_batches_are_cut_and_fetched_the_weights_are_the_same(unpadded, options):
    plain, _, plain_engine, _ = unpadded()
    padded, _, engine, _ = trained(**options)
    assert_same(plain, padded)
    assert engine.accountant.history == plain_engine.accountant.history


def test_batches_have_the_sizes_that_were_asked_for():
    _, optimizer, _, loader = trained(pad_batches=5)
    assert set(optimizer.engine.padding.sizes) == {5}
    assert {len(x) for x, _ in loader} == {5} and loader.sizes.sizes == (5,)
    _, optimizer, _, _ = trained(pad_batches=6, physical=3)
    assert set(optimizer.engine.padding.sizes) == {3}


def test_checkpointed_blocks_run_again_with_padded_batches(unpadded):
    plain, *_ = unpadded("blocks")
    padded, optimizer, _, _ = trained("blocks", pad_batches=True, memory_budget="lean")
    assert_same(plain, padded)
    assert "recomputed" in str(optimizer.engine.explain())


def test_an_empty_draw_is_a_step_of_noise_alone(unpadded):
    """One sample in 64 a draw: a third of the draws are empty."""
    plain, _, plain_engine, _ = unpadded(batch_size=1)
    padded, optimizer, engine, loader = trained(batch_size=1, pad_batches=2)
    assert_same(plain, padded)
    assert engine.accountant.history == plain_engine.accountant.history
    empty = [x for x, _ in loader if real_rows(x) == 0]
    assert empty and all(len(x) == 2 for x in empty)
    assert optimizer.padding_share > 0.4


def test_the_first_draw_may_be_empty():
    torch.manual_seed(0)
    model = make_model()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(make_data(), batch_size=1, generator=torch.Generator().manual_seed(7)),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        pad_batches=True,
    )
    before = [p.clone() for p in model.parameters()]
    x, y = next((x, y) for x, y in loader if real_rows(x) == 0)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_without_poisson_sampling_the_last_batch_is_filled_up(unpadded):
    options = {"poisson_sampling": False, "batch_size": 10, "epochs": 2}
    plain, *_ = unpadded(**options)
    padded, optimizer, engine, loader = trained(pad_batches=True, **options)
    assert_same(plain, padded)
    assert optimizer.engine.padding.sizes == {10: 14} and optimizer.padding_share == pytest.approx(12 / 140)
    # and so it goes on, with the private loader given to make_private once more
    _, _, again = engine.make_private(
        module=padded, optimizer=optimizer, data_loader=loader, noise_multiplier=0.5, max_grad_norm=0.3,
        poisson_sampling=False, pad_batches=True,
    )  # fmt: skip
    assert {len(x) for x, _ in again} == {10}


def test_a_private_loader_can_be_made_private_anew():
    model, optimizer, engine, loader = trained(pad_batches=True)
    for pad_batches in (True, False):
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.5, max_grad_norm=0.3,
            pad_batches=pad_batches,
        )  # fmt: skip
        train(model, optimizer, loader)
    assert optimizer.padding_share == 0


class Sentences(Dataset):
    """Dictionaries of different lengths, which the collate function empties."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(1, 7, (1,), generator=generator))
        return {"ids": torch.randint(1, 11, (length,), generator=generator), "label": index % 3, "text": ["w"] * length}


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(self.table(ids).sum(1))


def test_any_collate_function_sees_what_it_would_without_padding():
    weights = []
    for pad_batches in (False, 40):
        torch.manual_seed(0)
        model = Bag()
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(
                Sentences(), batch_size=5, collate_fn=collate, generator=torch.Generator().manual_seed(4)
            ),
            noise_multiplier=0.0,
            max_grad_norm=0.5,
            pad_batches=pad_batches,
        )
        for batch in loader:
            optimizer.zero_grad()
            inputs = {name: tensor.to("cpu") for name, tensor in batch["inputs"].items()}
            assert batch["table"].shape == (5, 5) and len(batch["names"]) <= len(batch["labels"])
            F.cross_entropy(model(**inputs), batch["labels"]).backward()
            optimizer.step()
        weights.append(model)
    assert_same(*weights)


@takes_compiled
@pytest.mark.slow
def test_compiled_draws_of_64_take_four_graphs_none_of_them_after_the_tenth():
    def train_compiled(compile, **options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, CLASSES))
        called = compile(model)
        called, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
            module=called,
            optimizer=torch.optim.SGD(called.parameters(), lr=0.1),
            data_loader=DataLoader(
                TensorDataset(torch.randn(2560, 3), torch.arange(2560) % CLASSES),
                batch_size=64,
                generator=torch.Generator().manual_seed(5),
            ),
            noise_multiplier=0.1,
            max_grad_norm=0.3,
            noise_generator=torch.Generator().manual_seed(6),
            **options,
        )
        for x, y in loader:
            draws.append(x.rows.draw if options else 0)
            train(called, optimizer, [(x, y)])
        return model, optimizer

    draws, compiled_in = [], []

    def backend(graph, inputs):
        compiled_in.append(draws[-1])
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    plain, _ = train_compiled(lambda model: model)
    padded, optimizer = train_compiled(
        lambda model: torch.compile(model, backend=backend, dynamic=False), pad_batches=True
    )
    torch._dynamo.reset()
    assert len(compiled_in) <= 4 and max(compiled_in) < 10
    assert optimizer.padding_share <= 0.05
    assert_same(plain, padded)


# -- what is refused ---------------------------------------------------------------------------------------------------


# -- neighbours --------------------------------------------------------------------------------------------------------


def test_neighbouring_batches_differ_by_one_clipped_sample_with_padding():
    def make_loop(*, noise_multiplier, max_grad_norm, seed):
        model = make_model()
        model, optimizer, _ = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(make_data(), batch_size=8),
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            noise_generator=torch.Generator().manual_seed(seed),
            pad_batches=True,
        )

        def step(batch):
            x, y = pad_batch(batch, 16 * -(-max(1, len(batch[0])) // 16))
            train(model, optimizer, [(x, y)])

        return dpscope.Loop(model=model, step=step, scale=1.0 / 8)

    found = dpscope.check_loop(make_loop, [make_data()[:8]])
    assert found.ok, str(found)


@pytest.mark.parametrize("failing", ["closing", "update"])
def test_parts_of_a_padded_draw_are_tried_again_or_refused_with_the_rest_of_it(failing, monkeypatch):
    """A draw of 16 in parts of 6; the second part fails, or the last one's update."""
    model, plain = make_model(), make_model()
    loader = DataLoader(make_data(), batch_size=16)
    engine, options = PrivacyEngine(), {"noise_multiplier": 0.0, "max_grad_norm": 0.5, "poisson_sampling": False}
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    _, optimizer, loader = engine.make_private(
        module=model, optimizer=sgd, data_loader=loader, pad_batches=6, **options
    )

    def take(x, y):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y, reduction="none")[: x.rows.real].sum() / 6).backward()
        optimizer.step()

    refused = 0
    for number, (x, y) in enumerate(loader):
        if number == 3:
            plain.load_state_dict(model.state_dict())
        try:
            with monkeypatch.context() as patch:
                if number == 1 and failing == "closing":
                    optimizer.zero_grad()
                    (F.cross_entropy(model(x), y, reduction="none")[: x.rows.real].sum() / 6).backward()
                    patch.setattr(microbatch, "clip_factors", lambda *args: 1 / 0)
                    optimizer.step()
                if number == 2 and failing == "update":
                    patch.setattr(sgd, "step", lambda: 1 / 0)
                take(x, y)
        except ZeroDivisionError:
            if failing == "closing":
                take(x, y)
                continue
            for _ in range(2):
                with pytest.raises(UserError, match="this draw was given up"):
                    take(x, y)
                refused += 1
        if number == 5:
            break
    assert refused == (2 if failing == "update" else 0)
    assert engine.accountant.history == [(0.0, 0.25, 2)]
    x, y = make_data()[16:32]
    expected = clipped_mean(x, y, divisor=16, model=plain)
    torch.testing.assert_close(moved(list(plain.parameters()), model), expected, rtol=1e-5, atol=1e-6)
