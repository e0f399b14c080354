"""Modules without a family: one unit each, per-sample gradients through torch.func."""

import pytest
import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import CLIPPING, REDUCTIONS, assert_exact, private_step
from tests.unit.flash.flash_models import sine_losses
from tests.unit.flash.layers.whole_units import whole

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


class ScaledBlock(nn.Module):
    """A bare parameter beside child layers: the block is the unit, its Linears belong to it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner, self.outer = nn.Parameter(torch.randn(6)), nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, x):
        return x + self.scale * self.outer(self.inner(x).tanh())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        mixed, weights = self.attention(x, x, x, attn_mask=mask, key_padding_mask=padding)
        return mixed + weights.sum(-1, keepdim=True)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(6, 6, num_layers=2, batch_first=True)

    def forward(self, x):
        output, state = self.cell(x, None)
        hidden = state[0] if isinstance(state, tuple) else state
        return output + hidden[-1].unsqueeze(1)


class ClassToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 2, 6))

    def forward(self, x):
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)


class OwnToken(nn.Module):
    """A parameter in a module of its own that is called without any tensor."""

    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.randn(1, 1, 6))

        def forward(self):
            return self.value * 2

    def __init__(self) -> None:
        super().__init__()
        self.token = self.Token()

    def forward(self, x):
        return x * self.token()


class DataDependent(nn.Module):
    """vmap cannot follow it; a loop can. Both branches compute the same, so samples stay apart."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return x * self.weight if x.sum().item() > 0 else self.weight * x


UNITS = {
    "bare parameter beside Linears": ScaledBlock,
    "multi-head attention": Attention,
    "LSTM": lambda: Recurrent(nn.LSTM),
    "GRU": lambda: Recurrent(nn.GRU),
    "class token": ClassToken,
    "parameter in a module of its own": OwnToken,
    "data-dependent": DataDependent,
    "PReLU": nn.PReLU,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    "two inputs": lambda: nn.Bilinear(6, 6, 6),
    "transposed convolution": lambda: nn.ConvTranspose1d(3, 3, 1),
}


class Between(nn.Module):
    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.before, self.unit, self.after = nn.Linear(6, 6), unit, nn.Linear(6, 2)

    def forward(self, x):
        h = self.before(x)
        return self.after(self.unit(h, h.tanh()) if isinstance(self.unit, nn.Bilinear) else self.unit(h))


@pytest.mark.parametrize("name", UNITS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_units_get_the_oracles_clipped_sums(name, batch, dtype):
    model = Between(whole(UNITS[name]())).to(dtype)
    batch = {"x": torch.randn(batch, 3, 6, dtype=dtype)}
    for clipping, reduction in zip(CLIPPING, (*REDUCTIONS, "mean"), strict=True):
        engine = assert_exact(model, batch, sine_losses, clipping=clipping, loss_reduction=reduction)
    if name not in ("LSTM", "GRU", "parameter in a module of its own"):  # these have a rule, or are followed
        assert "opaque" in {row.kind for row in engine.explain()}


def test_the_root_itself_may_be_a_unit():
    assert_exact(whole(ScaledBlock()), {"x": torch.randn(3, 6)}, sine_losses)


def test_a_unit_used_twice_counts_its_cross_terms():
    block = whole(ScaledBlock())
    assert_exact(nn.Sequential(block, nn.Tanh(), block), {"x": torch.randn(3, 6)}, sine_losses)


def test_a_parameter_shared_between_a_unit_and_a_layer():
    model = nn.Sequential(whole(ScaledBlock()), nn.Linear(6, 4))
    model[1].weight = model[0].inner.weight
    assert_exact(model, {"x": torch.randn(3, 6)}, sine_losses)


def test_explain_says_which_way_a_unit_runs_and_why():
    why = {row.parameter: row.why for row in assert_exact(*loop_case()).explain()}
    assert "unit (DataDependent) owns weight itself, so all of it" in why["unit.weight"]
    assert "a loop over samples, for vmap failed" in why["unit.weight"]


def loop_case():
    return Between(whole(DataDependent())), {"x": torch.randn(3, 6)}, sine_losses


def test_frozen_units_run_as_they_are():
    model = Between(ScaledBlock())
    model.unit.requires_grad_(False)
    assert_exact(model, {"x": torch.randn(3, 6)}, sine_losses)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.unit = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        x = self.first(x)
        return self.unit(x, x, x, need_weights=False)[0]


def test_attention_with_dropout_is_not_taken_for_one_that_mixes_samples():
    """Dropout is off while its answers for a batch and for single samples are compared, also inside of it."""
    for seed in range(16):  # some draw other numbers for samples than for the batch, if any are drawn
        torch.manual_seed(seed)
        model, x = Attending(), torch.randn(3, 1, 8)
        with FlashEngine(model, max_grad_norm=1.0) as engine:
            for _ in range(3):
                model(x).square().mean().backward()
                engine.finish()


def test_the_check_of_a_unit_seeds_no_generator_that_it_does_not_restore(monkeypatch):
    """A GPU that holds none of the unit's inputs would give the same noise in every run."""
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    model = nn.Sequential(ScaledBlock())
    state = torch.get_rng_state()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, {"x": torch.ones(3, 6)}, sine_losses)
    assert seeded == []
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_inside_a_unit_draws_for_each_sample():
    class Dropped(ScaledBlock):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5)

    model = Between(whole(Dropped()))
    with FlashEngine(model, max_grad_norm=1e6) as engine:
        private_step(engine, {"x": torch.ones(64, 6)}, sine_losses)
    assert len(engine.norms.unique()) > 32


def test_an_empty_batch_passes_through_a_unit():
    model = Between(whole(ScaledBlock()))
    with FlashEngine(model, max_grad_norm=1.0, loss_reduction="sum") as engine:
        private_step(engine, {"x": torch.zeros(0, 6)}, sine_losses)
    assert all(parameter.grad.count_nonzero() == 0 for parameter in model.parameters())


class BatchMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return (x - x.mean(0, keepdim=True)) * self.weight


def test_a_unit_that_does_not_treat_samples_apart_is_refused_at_the_first_batch():
    model = nn.Sequential(nn.Linear(6, 6), BatchMean())
    with FlashEngine(model, max_grad_norm=1.0):
        for _ in range(2):  # and again at the next
            with pytest.raises(UserError, match="samples mix"):
                model(torch.randn(3, 6))


def test_a_flattened_batch_whose_output_is_flat_too_is_exact():
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unit = ScaledBlock()

        def forward(self, x):
            return self.unit(x.flatten(0, 1))

    def losses(model, batch):
        return model(batch["x"]).sin().view(len(batch["x"]), -1).mean(1)

    assert_exact(Flat(), {"x": torch.randn(3, 4, 6)}, losses)


class ScaledEmbedding(nn.Embedding):
    """A forward of its own around nn.Embedding's, as some language models have it."""

    def forward(self, ids):
        return super().forward(ids) * 3.0


class PositionsByHand(nn.Module):
    """The same through torch.nn.functional, its padding row counted from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4))

    def forward(self, ids):
        return torch.nn.functional.embedding(ids, self.table, padding_idx=-7)


@pytest.mark.parametrize("embedding", [lambda: ScaledEmbedding(7, 4, padding_idx=0), PositionsByHand])
@pytest.mark.parametrize("clipping", CLIPPING)
def test_the_padding_row_of_an_embedding_inside_receives_no_gradient(embedding, clipping):
    torch.manual_seed(0)
    model = nn.Sequential(whole(embedding()), nn.Linear(4, 3))
    batch = {"x": torch.tensor([[0, 1, 2, 0], [3, 4, 5, 6], [0, 0, 0, 1]])}
    assert_exact(model, batch, sine_losses, clipping=clipping)
