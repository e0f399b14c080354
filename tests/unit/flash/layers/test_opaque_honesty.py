"""What a unit does behind its outputs: shared arguments, mixed samples, state it keeps, complex numbers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from dpscope.errors import UserError
from dpscope.flash import FlashEngine, run_oracle
from tests.unit.flash.agreement import assert_agrees, assert_exact, private_step, reference
from tests.unit.flash.flash_models import sine_losses

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


# -- arguments ---------------------------------------------------------------------------------------------------------


class MaskedMixing(nn.Module):
    """Positions mix by a mask (T, T) that all samples share; where `per_sample`, a bias (B, d) is each sample's own."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x, mask, bias=None):
        mixed = (mask @ x) * self.scale
        return mixed if bias is None else mixed + bias.unsqueeze(1)


class SharedMask(nn.Module):
    def __init__(self, *, biased: bool = False) -> None:
        super().__init__()
        self.before, self.unit, self.biased = nn.Linear(6, 6), MaskedMixing(), biased

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1]).tril() * torch.arange(1.0, x.shape[1] + 1)
        bias = x.detach().sum(1).cos() if self.biased else None
        return self.unit(self.before(x), mask, bias)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("batches", [(4,), (3, 4), (4, 3), (1, 4), (6, 4, 5)])
def test_a_mask_that_all_samples_share_is_never_split_among_them(batches, biased):
    """T = 4: a batch of four samples could be taken for one mask row a sample."""
    model = SharedMask(biased=biased)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for size in batches[:-1]:
            private_step(engine, {"x": torch.randn(size, 4, 6)}, sine_losses)
        model.zero_grad()
        x = torch.randn(batches[-1], 4, 6)
        private_step(engine, {"x": x}, sine_losses)
        found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        c = engine.max_grad_norm
    truth = run_oracle(model, {"x": x}, lambda m, batch: sine_losses(m, batch).sum(), max_grad_norm=c).clipped_sums
    for name, total in truth.items():
        torch.testing.assert_close(found[name], total, rtol=1e-4, atol=1e-5)


def test_an_argument_that_once_had_one_entry_a_sample_is_refused_when_it_no_longer_has():
    class TakesBias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(6))

        def forward(self, x, bias):
            return x * self.scale + bias

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unit = TakesBias()

        def forward(self, x, bias):
            return self.unit(x, bias)

    model = Model()
    model.unit.register_forward_pre_hook(lambda module, args: None)
    with FlashEngine(model, max_grad_norm=1.0):
        model(torch.randn(3, 6), torch.randn(3, 6))
        with pytest.raises((UserError, RuntimeError)):
            model(torch.randn(2, 6), torch.randn(5, 6))


# -- mixing ------------------------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """Batch normalisation by hand, hidden in different ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.gate = how, nn.Parameter(torch.zeros(6) if how == "closed gate" else torch.ones(6))
        self.opening = 0.0

    def forward(self, x):
        normal = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt()
        return {
            "small": lambda: x * self.gate + 1e-4 * normal,
            "dropout": lambda: F.dropout(x, 0.5) * self.gate + 0.02 * normal,
            "dropout after": lambda: F.dropout(x * self.gate + 0.02 * normal, 0.5),
            "random numbers": lambda: (x + torch.randn_like(x)) * self.gate + 0.02 * normal,
            "functional": lambda: x * self.gate + 1e-9 * F.batch_norm(x, None, None, training=True),
            "neighbour": lambda: x * self.gate + 1e-3 * x.roll(1, 0),
            "cumulative": lambda: x * self.gate + 1e-3 * x.cumsum(0),
            "largest": lambda: x * self.gate + 1e-3 * x.amax(0),
        }.get(self.how, lambda: x + self.gate * normal)()


HIDDEN = (
    "small", "dropout", "dropout after", "random numbers", "neighbour", "cumulative", "largest",
    "closed gate", "open",
)  # fmt: skip


@pytest.mark.parametrize("how", HIDDEN)
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_mixing_is_found_however_it_is_hidden(how, half):
    model = nn.Sequential(nn.Linear(6, 6), Mixing(how))
    precision = torch.autocast("cpu", torch.bfloat16, enabled=half)
    with FlashEngine(model, max_grad_norm=1.0), precision, pytest.raises(UserError, match=r"mix|how many samples"):
        model(torch.randn(5, 6))


def test_mixing_that_begins_later_is_found_within_twice_the_calls():
    class Later(Mixing):
        def forward(self, x):
            return x * self.gate + self.opening * x.mean(0)

    model = nn.Sequential(nn.Linear(6, 6), Later("open"))
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for _ in range(5):
            private_step(engine, {"x": torch.randn(4, 6)}, sine_losses)
        model[1].opening = 0.5
        with pytest.raises(UserError, match="samples mix"):
            for _ in range(4):
                private_step(engine, {"x": torch.randn(4, 6)}, sine_losses)


class Routed(nn.Module):
    """A mixture of experts: rows of different samples meet in one product, but do not mix."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 3), nn.Parameter(torch.randn(3, 6, 6))

    def forward(self, x):
        flat = x.reshape(-1, 6)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        output = torch.zeros_like(flat)
        for expert in range(3):
            rows = (chosen == expert).nonzero().flatten()
            output = output.index_add(0, rows, flat[rows] @ self.experts[expert] * weights[rows, None])
        return output.view(x.shape)


@pytest.mark.parametrize("unit", [Routed, lambda: nn.LSTM(6, 6, batch_first=True, dropout=0.5, num_layers=2)])
def test_units_whose_samples_only_meet_are_not_taken_to_mix(unit):
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unit = unit()

        def forward(self, x):
            output = self.unit(x)
            return output[0] if isinstance(output, tuple) else output

    model = nn.Sequential(nn.Linear(6, 6), First())
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for size in (2, 4, 7, 3):
            private_step(engine, {"x": torch.randn(size, 3, 6)}, sine_losses)


# -- checkpoints, caches, frozen roots ---------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, unit: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.before, self.unit, self.use_reentrant = nn.Linear(6, 6), unit, use_reentrant

    def forward(self, x):
        return checkpoint(self._inner, self.before(x), use_reentrant=self.use_reentrant)

    def _inner(self, h):
        return self.unit(self.unit(h).tanh())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner, self.drop = nn.Parameter(torch.randn(6)), nn.Linear(6, 6), nn.Dropout(0.0)

    def forward(self, x):
        return self.drop(self.inner(x * self.scale).sin() * self.scale)


class Looped(Scaled):
    def forward(self, x):
        x.sum().item()  # vmap cannot follow
        return super().forward(x)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("unit", [Scaled, Looped, nn.PReLU])
def test_units_inside_checkpoints(unit, use_reentrant):
    model = Checkpointed(unit(), use_reentrant=False)
    for size in (3, 2):
        batch = {"x": torch.randn(size, 4, 6)}
        truth, c = reference(model, batch, sine_losses)  # torch.autograd.grad cannot pass reentrant checkpoints
        model.zero_grad()
        model.use_reentrant = use_reentrant
        with FlashEngine(model, max_grad_norm=c) as engine:
            for _ in range(2):
                model.zero_grad()
                private_step(engine, batch, sine_losses)
        model.use_reentrant = False
        assert_agrees(model, batch, sine_losses, engine, truth, c)


def test_parametrised_units_inside_parametrize_cached():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh())
    twice = nn.Sequential(model[0], nn.Tanh(), model[0])

    def cached_losses(m, batch):
        with parametrize.cached():
            return sine_losses(m, batch)

    for _ in range(2):
        assert_exact(twice, {"x": torch.randn(3, 6)}, cached_losses)


class FrozenRoot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(6), requires_grad=False)
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.linear(x + self.shift))


def test_a_frozen_parameter_of_the_root_leaves_its_layers_to_their_families():
    model = FrozenRoot()
    engine = assert_exact(model, {"x": torch.randn(3, 6)}, sine_losses)
    assert "opaque" not in {row.kind for row in engine.explain()}
    model.shift.requires_grad_(True)
    assert_exact(model, {"x": torch.randn(3, 6)}, sine_losses)


def test_attention_with_frozen_projections_still_trains_the_last_one():
    model = nn.MultiheadAttention(6, 2, batch_first=True)
    model.in_proj_weight.requires_grad_(False)
    model.in_proj_bias.requires_grad_(False)

    def losses(m, batch):
        return m(batch["x"], batch["x"], batch["x"])[0].sin().sum((1, 2))

    assert_exact(model, {"x": torch.randn(3, 4, 6)}, losses)


# -- arguments that forward writes to ----------------------------------------------------------------------------------


class Context:
    def __init__(self) -> None:
        self.aux = torch.zeros(())


class Writer(nn.Module):
    """Leaves a value of each sample in what it was given: `where` says how."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.weight, self.where = nn.Parameter(torch.randn(6, 6)), where

    def forward(self, x, given):
        y = x @ self.weight
        if self.where == "dictionary":
            given["aux"] = y.square().mean(-1)
        elif self.where == "list":
            given.append(y.square().mean(-1))
        elif self.where == "object":
            given.aux = given.aux + y.square().mean(-1)
        else:
            given.add_(y)
        return y


class ReadsWhatWasWritten(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.writer, self.head = Writer(where), nn.Linear(6, 3)

    def forward(self, x):
        given = {
            "dictionary": {"aux": torch.zeros(len(x))},
            "list": [],
            "object": Context(),
            "tensor": torch.zeros_like(x),
        }[self.writer.where]
        y = self.head(self.writer(x, given))
        if self.writer.where == "tensor":
            return y + given.sum(-1, keepdim=True)
        aux = given["aux"] if isinstance(given, dict) else sum(given) if isinstance(given, list) else given.aux
        return y + aux.unsqueeze(-1)


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("where", ["dictionary", "list", "object", "tensor"])
def test_a_module_that_writes_into_its_arguments_is_exact(where, batch):
    assert_exact(ReadsWhatWasWritten(where), {"x": torch.randn(batch, 6)}, sine_losses)


COLLECTED: list[int] = []


class GrowingOutput(nn.Module):
    """Gives what was collected outside of it, as hooks that collect hidden states do: more at each run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        COLLECTED.append(1)
        return tuple(x @ self.weight for _ in COLLECTED)


def test_a_unit_whose_number_of_outputs_changes_is_refused_by_name():
    model = GrowingOutput()
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match="when it is run again"):
        model(torch.randn(3, 6))


class CheckpointInside(nn.Module):
    """A parameter of the model's own, and a checkpointed layer beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.block = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False) * self.scale


@pytest.mark.parametrize("batch", [1, 3])
def test_a_checkpoint_inside_a_unit_is_exact(batch):
    assert_exact(CheckpointInside(), {"x": torch.randn(batch, 6)}, sine_losses)


class WindowedUnit(nn.Module):
    """Runs sample by sample, because of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(6))

    def forward(self, x, mask=None):
        h = torch.fft.ifft(torch.fft.fft(x) * torch.fft.fft(self.filter)).real
        scores = h @ h.transpose(1, 2)
        return (scores if mask is None else scores + mask).softmax(-1) @ h


class Windowed(nn.Module):
    """Gives its unit a mask (T, T) for long sequences alone."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.unit = nn.Linear(6, 6), WindowedUnit()

    def forward(self, x):
        at = torch.arange(x.shape[1])
        return self.unit(self.before(x), -5.0 * ((at[:, None] - at).abs() >= 3) if len(at) > 4 else None)


def test_a_shared_mask_that_first_comes_with_as_many_samples_as_positions_is_not_split():
    model = Windowed()
    with FlashEngine(model, max_grad_norm=1.0, loss_reduction="sum") as engine:
        for batch, length in ((6, 4), (5, 3), (6, 6), (7, 7), (4, 6)):
            x = {"x": torch.randn(batch, length, 6)}
            truth = run_oracle(model, x, lambda m, batch: sine_losses(m, batch).sum(), max_grad_norm=1.0)
            model.zero_grad()
            private_step(engine, x, sine_losses)
            torch.testing.assert_close(engine.norms, truth.norms, rtol=1e-4, atol=1e-5)
