"""What the engine assumes of a model it verifies on the user's own batch: exact against the oracle, or refused."""

from __future__ import annotations

import random
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
from dpscope.flash.sample_rows import rehearsal
from tests.unit.flash.agreement import assert_agrees, assert_exact, private_step, reference
from tests.unit.flash.live_bytes import LiveBytes


def losses(model, batch):
    return model(batch["x"]).flatten(1).sin().mean(1)


def images(batch=4):
    return {"x": torch.randn(batch, 3, 6, 6)}


def rows(batch=4):
    return {"x": torch.randn(batch, 6)}


def head(*layers):
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


@torch.no_grad()
def made(model, batch):
    model(batch["x"])
    return model


# -- a layer that is not what its class says


class OtherConvForward(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight * 2, bias).tanh()


class ScalingGetattr(nn.Linear):
    def __getattr__(self, name):
        found = super().__getattr__(name)
        return found * 3 if name == "weight" else found


class PropertyWeight(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_parameter("raw", self._parameters.pop("weight"))

    @property
    def weight(self):
        return self.raw.tanh()


class OtherInstanceNorm(nn.InstanceNorm2d):
    def _apply_instance_norm(self, x):
        return super()._apply_instance_norm(x) * x.sigmoid()


class StandardisedConv(nn.Conv2d):
    """Weight standardisation, as private vision models have it."""

    def forward(self, x):
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return self._conv_forward(x, w, self.bias)


class StandardisedByBatchNorm(nn.Conv2d):
    """timm's way: batch_norm normalises the weight, not the samples."""

    def forward(self, x):
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, eps=1e-6)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: OtherConvForward(3, 4, 3),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), OtherInstanceNorm(4, affine=True)),
        lambda: StandardisedConv(3, 4, 3, padding=1),
        lambda: StandardisedByBatchNorm(3, 4, 3, padding=1),
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
        lambda: torch.nn.utils.weight_norm(nn.Conv2d(3, 4, 3)),
        lambda: torch.nn.utils.spectral_norm(nn.Conv2d(3, 4, 3)).eval(),
        lambda: prune.l1_unstructured(nn.Conv2d(3, 4, 3), "weight", 0.4),
    ],
    ids=[
        "conv_forward",
        "instance_norm",
        "standardised",
        "by batch_norm",
        "parametrized",
        "weight_norm",
        "spectral",
        "prune",
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_layer_that_is_not_what_its_class_says_is_exact(layer):
    batch = images()
    assert_exact(made(head(layer()), batch), batch, losses)


@pytest.mark.parametrize("layer", [ScalingGetattr, PropertyWeight])
def test_a_weight_that_is_not_the_parameter_is_exact(layer):
    assert_exact(nn.Sequential(layer(6, 5), nn.Tanh(), nn.Linear(5, 3)), rows(), losses)


def test_an_instance_with_a_method_of_its_own_is_exact():
    model = made(head(nn.Conv2d(3, 4, 3)), batch := images())
    conv = model[0]
    conv._conv_forward = lambda x, weight, bias: F.conv2d(x, weight.tanh(), bias).relu()
    assert_exact(model, batch, losses)


def test_a_class_patched_before_the_engine_is_exact():
    def forward(self, x):
        return F.linear(x, self.weight * 2, self.bias).tanh()

    with mock.patch.object(nn.Linear, "forward", forward):
        assert_exact(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), rows(), losses)


def two_steps(model, change, batch):
    """The second step's sums are exact though the model has changed after the first."""
    truth, c = None, 1.0
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, batch, losses)
        with change(model):
            model.zero_grad()
            with engine.without_taps():
                truth, c = reference(model, batch, losses)
            engine.max_grad_norm = c
            private_step(engine, batch, losses)
            with engine.without_taps():
                assert_agrees(model, batch, losses, engine, truth, c)


def patched_class(model):
    return mock.patch.object(
        nn.Linear, "forward", lambda self, x: F.linear(x, self.weight, self.bias) * x.mean(-1, True)
    )


def patched_function(model):
    def linear(x, weight, bias=None):
        return torch.ops.aten.linear(x, weight, bias).sin()

    return mock.patch.object(F, "linear", linear)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is F.linear else found


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class swapped_class:
    def __init__(self, model):
        self.layer = model[0]

    def __enter__(self):
        self.layer.__class__ = Doubled

    def __exit__(self, *error):
        self.layer.__class__ = nn.Linear


@pytest.mark.parametrize("change", [patched_class, patched_function, swapped_class, lambda model: Doubling()])
def test_a_layer_that_changes_after_the_engine_was_attached_stays_exact(change):
    two_steps(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), change, rows())


@pytest.mark.parametrize(
    ("layer", "name", "value"),
    [
        (lambda: nn.Conv2d(3, 4, 3, padding=2), "dilation", (2, 2)),
        (lambda: nn.Conv2d(3, 4, 3), "padding_mode", "circular"),
        (lambda: nn.Conv2d(3, 4, 3, padding=1), "stride", (2, 2)),
        (lambda: nn.Conv2d(3, 4, 3, stride=2), "padding", (1, 1)),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(4, 4)), "1.num_groups", 2),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), "1.eps", 1.0),
        (lambda: nn.LayerNorm(6), "eps", 1.0),
        (lambda: nn.RMSNorm(6), "eps", 1.0),
    ],
)
def test_options_are_read_at_each_call(layer, name, value):
    class Changed:
        def __init__(self, model):
            *path, self.name = name.split(".")
            self.module = model[0].get_submodule(".".join(path))

        def __enter__(self):
            setattr(self.module, self.name, value)

        def __exit__(self, *error):
            pass

    class Pooled(nn.Sequential):
        def forward(self, x):
            x = self[0](x)
            return self[1](x.flatten(2).mean(2))

    width = 3 if "Norm(" in repr(layer()) and "Conv" not in repr(layer()) else 4
    two_steps(Pooled(layer(), nn.Linear(width, 3)), Changed, images())


def test_a_parent_that_sets_its_childs_options_in_forward_is_exact():
    class Dilated(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 2)

        def forward(self, x):
            for step in (1, 2):
                self.conv.dilation = self.conv.padding = (step, step)
                x = self.conv(x).tanh()
            return self.out(x.mean((2, 3)))

    assert_exact(Dilated(), images(), losses)


@pytest.mark.parametrize("name", ["padding_idx", "max_norm"])
def test_an_embeddings_options_may_change(name):
    class Ids(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(9, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.out(self.table(x.abs().mul(3).long().clamp(max=8)).mean(1))

    model, batch = Ids(), rows()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, batch, losses)
        setattr(model.table, name, 2)
        model.zero_grad()
        if name == "max_norm":
            with pytest.raises(UserError, match="max_norm"):
                private_step(engine, batch, losses)
            return
        with engine.without_taps():
            truth, c = reference(model, batch, losses)
        engine.max_grad_norm = c
        private_step(engine, batch, losses)
        with engine.without_taps():
            assert_agrees(model, batch, losses, engine, truth, c)


@pytest.mark.parametrize("key", ["weight", "bias"])
def test_a_weight_or_bias_that_is_a_buffer_is_exact(key):
    layer = nn.Linear(6, 5)
    value = layer._parameters.pop(key)
    layer.register_buffer(key, value.detach().clone())
    assert_exact(nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 3)), rows(), losses)


# -- mixing that a first batch does not show


class SortsByLength(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x[x.abs().sum(-1).argsort()])


def test_a_model_that_sorts_its_samples_is_refused_though_the_first_batch_is_sorted():
    x = torch.randn(6, 6)
    x = x[x.abs().sum(-1).argsort()]
    with FlashEngine(SortsByLength(), max_grad_norm=1.0) as engine, pytest.raises(UserError, match="samples mix"):
        private_step(engine, {"x": x}, losses)


class MixesSometimes(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = nn.Linear(6, 3), draw

    def forward(self, x):
        if self.draw():
            x = 0.7 * x + 0.3 * x.roll(1, 0)
        return self.layer(x)


@pytest.mark.parametrize("draw", [lambda: torch.rand(()) < 0.5, lambda: random.random() < 0.5])
def test_mixing_with_a_probability_is_found_within_some_steps(draw):
    found = 0
    for seed in range(8):
        torch.manual_seed(seed)
        random.seed(seed)
        with FlashEngine(MixesSometimes(draw), max_grad_norm=1.0) as engine:
            try:
                for _ in range(9):
                    private_step(engine, rows(8), losses)
            except UserError as error:
                assert "mix" in str(error)
                found += 1
    assert found >= 7  # each look sees it with probability 1/2: eight looks in nine steps


def test_mixing_that_begins_late_is_found_within_twice_the_steps():
    model = MixesSometimes(lambda: False)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for _ in range(5):
            private_step(engine, rows(8), losses)
        model.draw = lambda: True
        with pytest.raises(UserError, match="samples mix"):
            for _ in range(5):
                private_step(engine, rows(8), losses)


def test_an_adjacency_that_is_diagonal_at_first_is_refused():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x, adjacency):
            return adjacency @ self.layer(x)

    model = Graph()
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match="mix"):
        model(torch.randn(5, 6), torch.eye(5))


def test_a_callable_argument_that_starts_to_mix_is_refused():
    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x, change):
            return self.layer(change(x))

    model = Called()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model(torch.randn(5, 6), lambda x: x).sum().backward()
        engine.finish()
        with pytest.raises(UserError, match="mix"):
            model(torch.randn(5, 6), lambda x: x - x.mean(0))


def test_a_way_of_calling_whose_rehearsal_fails_is_refused():
    class Once(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x, numbers=None):
            return self.layer(x) * (1.0 if numbers is None else next(numbers))

    model = Once()
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model(torch.randn(4, 6)).sum().backward()
        engine.finish()
        with pytest.raises(UserError, match="could not be run again"):
            # The rehearsals use the numbers up: the last one is the real forward's.
            model(torch.randn(4, 6), numbers=_Numbers())


class _Numbers:
    """An iterator that fails the first time."""

    def __init__(self):
        self.asked = 0

    def __deepcopy__(self, memo):
        return self

    def __copy__(self):
        return self

    def __next__(self):
        self.asked += 1
        if self.asked == 1:
            raise RuntimeError("not yet")
        return 1.0


# -- what is kept from step to step


class Remembers(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.layer, self.where = nn.Linear(6, 3), where
        self.last, self.items, self.table = None, [], {}

    def forward(self, x):
        before = {"attribute": self.last, "list": self.items[-1] if self.items else None, "dict": self.table.get("x")}[
            self.where
        ]
        now = x.detach().mean(0)
        self.last = now
        self.items.append(now)
        self.table["x"] = now
        return self.layer(x if before is None else x + before)


@pytest.mark.parametrize("where", ["attribute", "list", "dict"])
@pytest.mark.parametrize("batch", [1, 4])
def test_state_of_samples_that_reaches_the_next_step_is_refused(where, batch):
    refused = pytest.raises(UserError, match=r"from one step to the next \(in .*(last|items|table)")
    with FlashEngine(Remembers(where), max_grad_norm=1.0) as engine, refused:
        private_step(engine, rows(batch), losses)


def test_what_is_kept_and_never_read_is_no_matter():
    class Notes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = nn.Linear(6, 3), []

        def forward(self, x):
            self.last = self.layer(x).detach()
            self.seen.append(float(x.detach().mean()))
            return self.layer(x)

    assert_exact(Notes(), rows(), losses)


# -- any model


class TiedByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6)

    def forward(self, x):
        return F.linear(self.table(x.abs().mul(3).long().clamp(max=8)).tanh().mean(1), self.table.weight)


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


class Mixture(nn.Module):
    """Experts that are given the tokens routed to them, of any sample."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        tokens = x.reshape(-1, 3)
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            picked = (chosen == index).nonzero().squeeze(-1)
            out = out.index_add(0, picked, expert(tokens[picked]) * weights[picked, None])
        return out.reshape(x.shape)


class RelativeBias(nn.Module):
    """Positions, not samples, go into the embedding."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(12, 2), nn.Linear(6, 2)

    def forward(self, x):
        places = torch.arange(6)
        bias = self.table((places[:, None] - places).abs()).permute(2, 0, 1).sum(0)
        return self.last(x @ bias)


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


# -- what it takes


def test_the_first_step_peaks_no_higher_than_the_next_where_outputs_are_the_largest_tensors(monkeypatch):
    monkeypatch.setattr(rehearsal, "SLICE", 2**12)  # of outputs of half a million elements
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
