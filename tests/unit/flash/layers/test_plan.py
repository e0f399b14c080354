"""Which modules are tapped and which are refused, by name and with what to use instead."""

import pytest
import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.flash import FlashEngine, LayerTap, register_layer
from dpscope.flash import layers as families
from tests.unit.flash.agreement import assert_exact

REFUSED = [
    (nn.BatchNorm1d(4), "GroupNorm"),
    (nn.BatchNorm2d(4), "GroupNorm"),
    (nn.SyncBatchNorm(4), "GroupNorm"),
    (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), "track_running_stats=False"),
    (nn.Embedding(4, 4, max_norm=1.0), "without max_norm"),
    (nn.Embedding(4, 4, sparse=True), "without sparse"),
    (nn.Embedding(4, 4, scale_grad_by_freq=True), "without scale_grad_by_freq"),
    (nn.EmbeddingBag(4, 4, max_norm=1.0), "without max_norm"),
    (nn.LazyLinear(4), "run one batch"),
]


@pytest.mark.parametrize(("module", "instead"), REFUSED, ids=lambda value: type(value).__name__)
def test_what_has_no_per_sample_gradient_is_refused_before_anything_is_attached(module, instead):
    model = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"bad": module}))
    with pytest.raises(UserError, match=rf"1\.bad \({type(module).__name__}\).*{instead}"):
        FlashEngine(model, max_grad_norm=1.0)
    assert all("forward" not in vars(child) for child in model.modules())


class HeadOnly(nn.Module):
    """A backbone that is not trained, with layers that could not be."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, max_norm=1.0)
        self.bag = nn.EmbeddingBag(9, 6, mode="mean", max_norm=1.0)
        self.norm, self.plain = nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False)
        self.cell = nn.LSTM(6, 6)
        self.requires_grad_(False)
        self.head = nn.Linear(6, 3)

    def forward(self, ids):
        x = self.plain(self.norm(self.table(ids).transpose(1, 2))).permute(2, 0, 1)
        return self.head(self.cell(x)[0].mean(0) + self.bag(ids))


def test_frozen_modules_that_could_not_be_trained_run_as_they_are():
    model = HeadOnly()
    model.norm.running_mean.normal_()
    model.norm.eval(), model.plain.eval()
    before = model.norm.running_mean.clone()
    assert_exact(model, {"x": torch.randint(0, 9, (4, 4))}, lambda m, b: m(b["x"]).sin().sum(1))
    assert torch.equal(model.norm.running_mean, before)


@pytest.mark.parametrize("name", ["table", "bag", "norm"])
def test_a_frozen_module_that_is_switched_on_is_refused_by_name(name):
    model = HeadOnly()
    model.norm.eval(), model.plain.eval()
    with FlashEngine(model, max_grad_norm=1.0):
        model(torch.randint(0, 9, (4, 4)))
        getattr(model, name).requires_grad_(True)
        with pytest.raises(UserError, match=rf"^{name} \("):
            model(torch.randint(0, 9, (4, 4)))


@pytest.mark.parametrize("name", ["norm", "plain"])
def test_a_frozen_batch_norm_in_training_mode_is_refused(name):
    model = HeadOnly().eval()
    getattr(model, name).train()
    with FlashEngine(model, max_grad_norm=1.0), pytest.raises(UserError, match=rf"^{name} .*training mode.*eval\(\)"):
        model(torch.randint(0, 9, (4, 4)))


def test_a_subclass_with_a_forward_of_its_own_is_not_taken_for_its_family():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Doubled(3, 3), nn.Linear(3, 2))
    engine = assert_exact(model, {"x": torch.randn(4, 3)}, lambda m, batch: m(batch["x"]).sin().sum(1))
    assert {row.module: row.kind for row in engine.explain()} == {"0": "kept", "1": "kept"}
    assert "0" in engine.explain()[0].module


def test_a_subclass_that_keeps_the_forward_belongs_to_the_family():
    class Named(nn.Linear):
        pass

    assert families.family_of(Named(2, 2)) is families.family_of(nn.Linear(2, 2))


def test_a_registered_layer_is_run_by_its_handler(monkeypatch):
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.bias

    class ShiftTap(LayerTap):
        names = ("bias",)

        def forward(self, ctx, x):
            return self.original(x)

        def backward(self, ctx, g):
            self.keep(0, g.flatten(1, -2).sum(1) if g.dim() > 2 else g.clone())
            return g

    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    register_layer(Shift, ShiftTap)
    model = nn.Sequential(nn.Linear(3, 3), Shift(), nn.Tanh())
    engine = assert_exact(model, {"x": torch.randn(4, 5, 3)}, lambda m, batch: m(batch["x"]).sum((1, 2)))
    assert "opaque" not in {row.kind for row in engine.explain()}


def test_a_handler_that_forgets_a_parameter_is_found_and_the_module_is_run_in_another_way(monkeypatch):
    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    class ForgetfulTap(LayerTap):
        names = ("weight",)

        def forward(self, ctx, x):
            ctx.save_for_backward(self.parameters["weight"])
            return self.original(x)

        def backward(self, ctx, g):
            return g @ ctx.saved_tensors[0].T

    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    register_layer(Mix, ForgetfulTap)
    model = nn.Sequential(nn.Linear(3, 3), Mix(), nn.Tanh())
    assert_exact(model, {"x": torch.randn(4, 5, 3)}, lambda m, batch: m(batch["x"]).sum((1, 2)))
