"""What the engine assumes of a model it verifies on the user's own batch: exact against the oracle, or refused."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
from dpscope.flash.sample_rows import comparison, row_norms, self_test
from dpscope.flash.sample_rows.self_test import SelfTest
from dpscope.flash.step import microbatch
from tests.unit.flash.agreement import assert_exact, assert_next_step_is_exact, private_step
from tests.unit.flash.live_bytes import LiveBytes
from tests.unit.flash.sample_rows.verified_models import Mixture, RelativeBias, Routed, TiedByHand, losses, rows

# -- any model


class Flattened(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(10, 2)

    def forward(self, x):
        h = self.norm(self.first(x.reshape(-1, 3)).tanh())
        return self.last(h.reshape(len(x), -1))


class Frames(nn.Module):
    """A video: images of all samples in one batch for the convolution."""

    def __init__(self, groups=1):
        super().__init__()
        self.conv, self.norm, self.last = (
            nn.Conv2d(2, 4, 2, groups=groups, bias=True),
            nn.GroupNorm(2, 4),
            nn.Linear(4, 2),
        )

    def forward(self, x):
        frames = x.reshape(-1, 2, 3, 3)
        return self.last(self.norm(self.conv(frames)).tanh().mean((2, 3)).reshape(len(x), -1, 4).mean(1))


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (TiedByHand, rows),
        (Flattened, rows),
        (Frames, lambda: {"x": torch.randn(3, 4, 2, 3, 3)}),
        (lambda: Frames(groups=2), lambda: {"x": torch.randn(3, 4, 2, 3, 3)}),
        (Mixture, lambda: {"x": torch.randn(3, 5, 3)}),
        (RelativeBias, rows),
        (RelativeBias, lambda: rows(6)),
        (RelativeBias, lambda: rows(3)),
    ],
)
def test_models_whose_rows_are_not_their_samples_everywhere_are_exact(model, batch):
    assert_exact(model(), batch(), losses)


def test_dropout_is_no_obstacle():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for _ in range(5):
            private_step(engine, rows(), losses)


def test_the_random_numbers_of_training_are_those_of_an_untouched_model():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    batch = rows()
    torch.manual_seed(3)
    expected = model(batch["x"])
    torch.manual_seed(3)
    with FlashEngine(model, max_grad_norm=1.0):
        torch.testing.assert_close(model(batch["x"]), expected)


class LearnedState(nn.Module):
    """The first state of a recurrent layer is a parameter, behind a gate that is closed at first."""

    def __init__(self):
        super().__init__()
        self.inner, self.start = nn.GRU(6, 6, batch_first=True), nn.Parameter(torch.randn(1, 1, 6))
        self.gate, self.last = nn.Parameter(torch.zeros(())), nn.Linear(6, 2)

    def forward(self, x):
        state = self.start.expand(-1, len(x), -1)
        return self.last((x + self.gate * self.inner(x, state)[0]).mean(1))


def test_a_state_that_is_a_parameter_is_exact_once_its_gate_opens():
    model = LearnedState()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for size in (1, 4, 5):
            assert_next_step_is_exact(engine, {"x": torch.randn(size, 3, 6)}, losses)
            with torch.no_grad():
                model.gate.add_(0.5)
        assert "opaque" not in str(engine.explain())


def test_gradients_behind_a_gate_that_is_closed_are_compared_too():
    """LoRA's B is zero at first, and the gradient of A with it."""
    model = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 3))
    nn.init.zeros_(model[1].weight)
    compared = []

    def note(test, parameters, errors):
        compared.append(dict(zip(parameters, test._sizes.tolist(), strict=True)))
        return {}

    with mock.patch.object(SelfTest, "_bad_sums", note), FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, rows(), losses)
    assert compared[0][model[0].weight] > 0
    assert not model[1].weight.any()


def test_a_mixture_that_gives_out_the_scores_of_its_tokens_runs_alone_sample_by_sample():
    model = Routed()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, {"x": torch.randn(3, 5, 3)}, losses)
        assert [unit.name for unit in engine.per_sample_modules()] == ["router"]
    model.zero_grad()
    assert_exact(model, {"x": torch.randn(3, 5, 3)}, losses)


class FromDictionaries(nn.Module):
    """Several parameters of one layer, in dictionaries, used where they cannot be followed (LoHa)."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.ParameterDict({"x": nn.Parameter(torch.randn(6, 6))}) for _ in range(2))

    def forward(self, x):
        return x @ Product.apply(self.a["x"], self.b["x"])


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b, g * a


def test_modules_with_one_parent_climb_to_it_and_no_further():
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(FromDictionaries(), nn.Tanh()), nn.Linear(6, 2))
    batch = rows()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, batch, losses)
        assert [unit.name for unit in engine.per_sample_modules()] == ["1.0"]
    model.zero_grad()
    assert_exact(model, batch, losses)


class WithTable(nn.Module):
    """A table that all samples share has as many rows as there are samples, in one batch of two."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x, labels, table):
        return self.last(torch.tanh(self.first(x) + table[: x.shape[1]]).mean(1)).gather(1, labels[:, None])


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (3, 3)])
def test_a_table_with_as_many_rows_as_samples_is_shared_all_the_same(sizes):
    model = WithTable().double()
    table = torch.randn(3, 6, dtype=torch.float64)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for size in sizes:
            batch = torch.randn(size, 3, 6, dtype=torch.float64), torch.randint(2, (size,))
            assert_next_step_is_exact(engine, batch, lambda model, batch: model(*batch, table).squeeze(1))


class CheckpointedConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = OddConv(3, 4, 3, padding=1)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(checkpoint(self.conv, x, use_reentrant=False).mean((2, 3)))


class OddConv(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x, self.weight.tanh(), self.bias)


def test_a_checkpointed_layer_that_is_followed_takes_other_options():
    model = CheckpointedConv()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for dilation, size in ((1, 3), (2, 1), (2, 3)):  # one sample alone says nothing about the new operator
            model.conv.dilation = model.conv.padding = (dilation, dilation)
            assert_next_step_is_exact(engine, {"x": torch.randn(size, 3, 6, 6)}, losses)


# -- what it takes


def test_verification_takes_few_forward_passes():
    model, runs = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double(), []
    model[1].register_forward_hook(lambda *call: runs.append(len(call[2])))
    taken = []
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for _ in range(4):
            runs.clear()
            private_step(engine, {"x": torch.randn(32, 6, dtype=torch.float64)}, losses)
            taken.append(list(runs))
    first, second, third, fourth = taken
    # Thirds of the batch replaced, the same in another order; all samples and two of them; the self-test.
    assert len(first) == 3 + 3 + 2 + 3 + 1
    assert sorted(first)[-3:] == [7, 32, 32]  # the rest, on a quarter of the batch
    assert (len(second), len(third), len(fourth)) == (3 + 1, 1, 3 + 2 + 1)


class TwoBiases(nn.Module):
    """Two tables that are given positions: each is found when the one before it is followed."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Embedding(6, 6), nn.Embedding(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        positions = torch.arange(6)
        h = (x[:, None] + self.first(positions)).tanh()
        return self.last((h + self.second(positions)).tanh()).mean(1)


def test_a_self_test_that_begins_again_keeps_what_the_untouched_model_gave(monkeypatch):
    gradients = mock.Mock(side_effect=self_test._gradients)
    monkeypatch.setattr(self_test, "_gradients", gradients)
    assert_exact(TwoBiases(), rows(12), losses)
    assert gradients.call_count == 1


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_sign_that_is_kept_of_the_samples_is_found(steps_before):
    class Signed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.sign, self.keeps = nn.Linear(6, 3), 1.0, False

        def forward(self, x):
            sign, self.sign = self.sign, 1.0 if x.mean() > 0 else -1.0
            return self.layer(x) * (sign if self.keeps else 1.0)

    for seed in range(4):
        torch.manual_seed(seed)
        model, batch = Signed(), {"x": torch.rand(32, 6)}
        with FlashEngine(model, max_grad_norm=1.0) as engine:
            for _ in range(steps_before):
                private_step(engine, batch, losses)
            model.keeps = True
            with pytest.raises(UserError, match="keeps something"):
                private_step(engine, batch, losses)


def test_the_first_step_peaks_no_higher_than_the_next_where_outputs_are_the_largest_tensors(monkeypatch):
    monkeypatch.setattr(comparison, "SLICE", 2**12)  # of outputs of half a million elements
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4096))
    ids = torch.randint(50, (2, 64))
    engine = FlashEngine(model, max_grad_norm=1.0, loss_reduction="mean")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DPFlashOptimizer(sgd, engine=engine, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=2)

    def peak_of_a_step():
        with LiveBytes(*model.parameters()) as live:
            tokens = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="none")
            tokens.view(2, -1).mean(1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return live.peak

    first, second = peak_of_a_step(), peak_of_a_step()
    assert first <= 1.05 * second  # the gradients that it compares are held besides


def test_a_large_model_is_verified_with_one_set_of_gradients():
    """The engine's sums are compared as they are made, and not held beside autograd's gradients."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))
    weights = sum(p.nbytes for p in model.parameters())
    peaks = []
    with (
        mock.patch.object(microbatch, "GROUP_BYTES", 4 * 256 * 256),  # far below the model, as for a large one
        FlashEngine(model, max_grad_norm=1.0) as engine,
    ):
        for _ in range(4):  # the self-test is a part of the first pass and of the fourth
            with LiveBytes(*model.parameters()) as live:
                private_step(engine, {"x": torch.randn(8, 256)}, losses)
                engine.zero_grad()
            peaks.append(live.peak / weights)
    assert engine.verification.schedule.looks == [2, 4]
    assert max(peaks) < 2.7  # weights, gradients, and what two layers need besides


class MixesGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 0.9 * g + 0.1 * g.roll(1, 0)


class MixedInBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 300), nn.Linear(300, 2)

    def forward(self, x):
        return self.last(MixesGradients.apply(self.first(x)))


def test_gradients_of_a_large_model_are_compared_by_projections(monkeypatch):
    monkeypatch.setattr(self_test, "HELD_BYTES", -1)
    kept = []
    compared = SelfTest._compared
    monkeypatch.setattr(SelfTest, "_compared", lambda *args: kept.append(compared(*args)) or kept[-1])
    assert_exact(nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 2)), {"x": torch.randn(5, 6)}, losses)
    assert kept
    assert {each.shape[-1] for each in kept} == {self_test.PROJECTIONS}
    kept.clear()
    with (
        FlashEngine(MixedInBackward(), max_grad_norm=1.0) as engine,
        pytest.raises(UserError, match="not ordinary autograd's"),
    ):
        private_step(engine, {"x": torch.randn(5, 6)}, losses)
    assert {each.shape[-1] == self_test.PROJECTIONS for each in kept} == {True, False}  # a difference is seen in full


def test_projections_are_as_large_as_what_they_are_made_of():
    test = object.__new__(SelfTest)
    for seed, shape in enumerate([(7,), (300, 40), (3, 2**17)]):
        test.seed, test.holds_gradients = seed, False
        for tensor in (torch.randn(shape), torch.ones(shape)):
            found = test._compared(tensor).norm() / self_test.PROJECTIONS**0.5
            assert 0.1 * tensor.norm() < found < 3 * tensor.norm()


def test_norms_that_leave_the_range_of_float32_are_taken_in_float64():
    one = torch.randn(3, 50)
    tensors = [one, 1e-30 * one, 1e30 * one, torch.zeros(4), one.bfloat16(), torch.tensor([1.0, math.inf]), one[:, 0]]
    wanted = [float(torch.linalg.vector_norm(each.double())) for each in tensors]
    assert self_test._norms(tensors).tolist() == pytest.approx(wanted, rel=1e-2)  # bfloat16's own rounding
    assert math.isnan(self_test._norms([torch.tensor([math.nan])]))
    assert self_test._norms([one.clone()], [one - 1e-25]).tolist() == pytest.approx([0.0], abs=1e-5)


def test_sums_of_silent_samples_are_made_only_where_something_reaches_them():
    model, made = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2)), []
    make = SelfTest._sum
    note = mock.patch.object(
        SelfTest, "_sum", lambda test, recorded, *args: made.append(len(recorded)) or make(test, recorded, *args)
    )
    with note:
        assert_exact(model, {"x": torch.randn(5, 6)}, losses)
    with note, mock.patch.object(self_test, "_linear_in", lambda part: None):  # which cannot be looked into
        assert_exact(model, {"x": torch.randn(5, 6)}, losses)
    assert made == [4, 0, 4, 4]


# -- rounding


class CastsInside(nn.Module):
    """Autocast of its own, as Accelerate puts around a model's forward."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks, self.first, self.last = blocks, nn.Linear(3, 16), nn.Linear(16, 2)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.blocks(self._block, x).float()

    def _block(self, x):
        return self.last(self.first(x).tanh().mean(1)).float()


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_rounding_of_an_autocast_inside_the_model_is_no_difference(reentrant):
    def blocks(function, x):
        return function(x) if reentrant is None else checkpoint(function, x, use_reentrant=reentrant)

    exact = {torch.float32: (1e-6, 1e-9)}
    with mock.patch.dict(row_norms._SUMS, exact), mock.patch.dict(self_test._OUTPUTS, {torch.float32: 1e-7}):
        model = CastsInside(blocks)
        with FlashEngine(model, max_grad_norm=1.0):
            model(torch.randn(4, 6, 3).requires_grad_()).square().sum(1).mean().backward()
