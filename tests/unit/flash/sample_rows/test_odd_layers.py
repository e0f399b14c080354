"""A layer that is not what its class says, or is changed after the engine was attached, is exact."""

from __future__ import annotations

import copy
import functools
import pickle
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import assert_agrees, assert_exact, private_step, reference
from tests.unit.flash.sample_rows.verified_models import Routed, head, images, losses, made, rows, two_steps


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


class Nudging(TorchFunctionMode):
    """Changes products by less than the self-test tells from rounding."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found + 0.003 * found.square() if func is F.linear else found


@pytest.mark.parametrize(
    "change",
    [patched_class, patched_function, swapped_class, lambda model: Doubling(), lambda model: Nudging()],
)
def test_a_layer_that_changes_after_the_engine_was_attached_stays_exact(change):
    two_steps(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), change, rows())


class OwnScale(nn.Module):
    """Its parameters are followed to the operators that use them."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))

    def forward(self, x):
        return F.layer_norm(x, (6,), self.scale * 2, self.shift)


class OwnForward(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class OneByOne(nn.Module):
    """Runs sample by sample."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x):
        return torch.stack([F.layer_norm(self.norm(self.first(row)), (6,)) for row in x])


def wrapped(own):
    return functools.wraps(own)(lambda *args, **more: own(*args, **more).sin())


@pytest.mark.parametrize("model", [OwnScale, lambda: OwnForward(6), OneByOne])
@pytest.mark.parametrize(
    "replaced",
    [
        lambda own: lambda *args, **more: own(*args, **more).sin(),
        wrapped,
        lambda own: wrapped(wrapped(own)),
        lambda own: mock.Mock(side_effect=lambda *args, **more: own(*args, **more).sin()),
    ],
    ids=["function", "wrapped", "twice", "object"],
)
def test_a_function_that_is_replaced_while_a_model_runs_is_applied_once(model, replaced):
    two_steps(
        nn.Sequential(model(), nn.Linear(6, 3)),
        lambda _: mock.patch.object(F, "layer_norm", replaced(F.layer_norm)),
        rows(),
    )


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


@pytest.mark.parametrize("shown", ["a class patched for a while", "another class for an instance"])
def test_the_forward_of_a_followed_module_is_the_one_that_it_has_now(shown):
    """Its parameters are followed, so that no family would notice."""
    model = nn.Sequential(nn.Linear(6, 5), Scaled(), nn.Linear(5, 3))
    if shown == "another class for an instance":
        change = swapped_class_of(model[1], Shifted)
        two_steps(model, lambda model: change, rows())
        return
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        with mock.patch.object(Scaled, "forward", lambda self, x: (self.scale * x).sin()):
            private_step(engine, rows(), losses)
        model.zero_grad()
        batch = rows()
        with engine.without_taps():
            truth, c = reference(model, batch, losses)
        engine.max_grad_norm = c
        private_step(engine, batch, losses)
        with engine.without_taps():
            assert_agrees(model, batch, losses, engine, truth, c)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return self.scale * x


class Shifted(Scaled):
    def forward(self, x):
        return super().forward(x).sin() + 1


class swapped_class_of:
    def __init__(self, layer, cls):
        self.layer, self.before, self.cls = layer, type(layer), cls

    def __enter__(self):
        self.layer.__class__ = self.cls

    def __exit__(self, *error):
        self.layer.__class__ = self.before


def test_a_bias_that_is_removed_from_a_module_that_runs_sample_by_sample_is_not_missed():
    model = Routed()

    class Removed:
        def __init__(self, model):
            self.layer = model.router.gate

        def __enter__(self):
            self.layer.bias = None

        def __exit__(self, *error):
            pass

    two_steps(model, Removed, {"x": torch.randn(4, 5, 3)})


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_copy_of_a_private_model_with_derived_weights_is_an_ordinary_model():
    """Hooks that put stand-ins in place before weight_norm's own stay behind."""
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(6, 3)))
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, rows(), losses)
        with torch.no_grad():
            expected = model(rows()["x"][:0])
            plain = copy.deepcopy(model)
            assert torch.equal(plain(rows()["x"][:0]), expected)
        plain(rows()["x"]).sum().backward()
        assert plain[0].weight_g.grad is not None
        hook = next(iter(model[0]._forward_pre_hooks.values()))
        assert pickle.loads(pickle.dumps(hook)).run is None


def test_a_function_that_torchs_recurrent_kernels_do_not_ask_for_is_no_part_of_their_rule():
    model, batch = nn.GRU(6, 4, batch_first=True), {"x": torch.randn(3, 5, 6)}

    def of_states(model, batch):
        return model(batch["x"])[0].mean((1, 2))

    with mock.patch.object(F, "linear", side_effect=AssertionError("torch's own kernel does not call it")):
        assert_exact(model, batch, of_states)
