"""What a project that used opacus.PrivacyEngine finds once the import is changed: the rows of the table in flash.md."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine as OpacusPrivacyEngine
from opacus.grad_sample import GradSampleModule
from opacus.validators.errors import UnsupportedModuleError
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import PrivacyEngine
from tests.unit.flash.private_training import (
    FEATURES,
    clipped_mean,
    make_data,
    make_loader,
    make_model,
    make_private,
    moved,
    sgd,
    step,
)

# -- checkpoints -------------------------------------------------------------------------------------------------------


def a_run(engine_class: type[OpacusPrivacyEngine], seed: int = 0):
    model = make_model(seed)
    engine = engine_class()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return engine, *make_private(model, optimizer, engine)


@pytest.mark.parametrize(
    ("saving", "loading"),
    [(OpacusPrivacyEngine, PrivacyEngine), (PrivacyEngine, OpacusPrivacyEngine), (PrivacyEngine, PrivacyEngine)],
)
def test_a_run_goes_on_from_a_checkpoint_of_either_engine(saving, loading) -> None:
    x, y = make_data().tensors
    engine, model, optimizer, _ = a_run(saving)
    step(model, optimizer, x[:16], y[:16])
    path = io.BytesIO()
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    step(model, optimizer, x[16:32], y[16:32])
    path.seek(0)
    resumed, other, other_optimizer, _ = a_run(loading, seed=1)
    resumed.load_checkpoint(path=path, module=other, optimizer=other_optimizer)
    step(other, other_optimizer, x[16:32], y[16:32])
    for got, expected in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)  # Adam magnifies the rounding of gradients
    assert resumed.accountant.history == engine.accountant.history


def test_a_private_model_loads_the_state_of_opacuss_wrapper_and_its_own() -> None:
    wrapped = GradSampleModule(make_model(seed=1))
    for state in (wrapped.state_dict(), make_model(seed=1).state_dict()):
        model, optimizer, _ = make_private(model := make_model(), sgd(model))
        model.load_state_dict(state)
        torch.testing.assert_close(model[0].weight, wrapped._module[0].weight)
    optimizer.engine.detach()
    with pytest.raises(RuntimeError, match="Missing"):
        model.load_state_dict(wrapped.state_dict())


def test_a_checkpoint_of_another_model_is_still_refused() -> None:
    model, _, _ = make_private(model := make_model(), sgd(model))
    with pytest.raises(RuntimeError, match="Missing"):
        model.load_state_dict({f"_module.module.{name}": p for name, p in make_model().state_dict().items()})


# -- modes -------------------------------------------------------------------------------------------------------------


def test_hooks_asked_for_in_so_many_words_are_flash_and_that_is_said() -> None:
    model = make_model()
    with pytest.warns(UserWarning, match="grad_sample_mode='hooks' uses flash clipping"):
        private, optimizer, loader = make_private(model, sgd(model), grad_sample_mode="hooks")
    assert private is model
    before = [p.detach().clone() for p in model.parameters()]
    x, y = next(iter(loader))
    step(private, optimizer, x, y)
    for got, expected in zip(moved(before, model), clipped_mean(x, y, divisor=16), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", ["functorch", "ew"])
def test_other_modes_are_opacuss_and_that_is_said(mode: str) -> None:
    model = make_model()
    with pytest.warns(UserWarning, match=f"'{mode}' is Opacus's engine"):
        private, _, _ = make_private(model, sgd(model), grad_sample_mode=mode)
    assert private._module is model


def test_without_wrapping_the_model_is_used_as_it_is_and_given_back_by_cleanup() -> None:
    model = make_model()
    hooks, optimizer, loader = make_private(model, sgd(model), wrap_model=False)
    step(model, optimizer, *next(iter(loader)))
    hooks.cleanup()
    assert "forward" not in vars(model)


# -- models ------------------------------------------------------------------------------------------------------------

MODELS = {
    "linear": make_model,
    "a model in eval mode": lambda: make_model().eval(),
    "lstm": lambda: nn.LSTM(FEATURES, 4, batch_first=True),
    "batch norm": lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4)),
    "only batch norm": lambda: nn.BatchNorm1d(4),
    "instance norm with running statistics": lambda: nn.Sequential(
        nn.Conv1d(2, 4, 1), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    ),
    "batch norm and lstm": lambda: nn.ModuleDict(
        {"a": nn.BatchNorm2d(4), "b": nn.LSTM(FEATURES, 4, batch_first=True), "c": nn.Linear(2, 2)}
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_validation_says_what_make_private_does(name: str) -> None:
    model = MODELS[name]()
    compatible = PrivacyEngine().is_compatible(module=model, optimizer=None, data_loader=None)
    try:
        make_private(model, sgd(model))[1].engine.detach()
    except UnsupportedModuleError as refusal:
        assert isinstance(refusal, UserError)
        assert not compatible
        with pytest.raises(UnsupportedModuleError) as validation:
            PrivacyEngine().validate(module=model, optimizer=None, data_loader=None)
        assert str(validation.value) == str(refusal)
    else:
        assert compatible
        PrivacyEngine().validate(module=model, optimizer=None, data_loader=None)


@pytest.mark.parametrize("name", MODELS)
def test_a_compatible_module_is_a_copy_that_make_private_takes(name: str) -> None:
    model = MODELS[name]()
    fixed = PrivacyEngine.get_compatible_module(model)
    assert fixed is not model
    make_private(fixed, sgd(fixed))
    assert [type(a) for a in model.modules()] == [type(a) for a in MODELS[name]().modules()]


def test_only_what_is_refused_is_replaced() -> None:
    fixed = PrivacyEngine.get_compatible_module(MODELS["batch norm and lstm"]())
    assert [type(layer) for layer in fixed.values()] == [nn.GroupNorm, nn.LSTM, nn.Linear]


# -- arguments ---------------------------------------------------------------------------------------------------------


def noise_for(engine_class, *, accountant: str = "rdp", **options) -> float:
    model = make_model()
    _, optimizer, _ = engine_class(accountant=accountant).make_private_with_epsilon(
        module=model,
        optimizer=sgd(model),
        data_loader=make_loader(),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=2,
        max_grad_norm=1.0,
        **options,
    )
    return optimizer.noise_multiplier


@pytest.mark.filterwarnings("ignore:Optimal order:UserWarning")
@pytest.mark.parametrize("options", [{}, {"epsilon_tolerance": 0.5}, {"alphas": [2.0, 4.0, 8.0]}])
def test_make_private_with_epsilon_finds_opacuss_noise_multiplier(options) -> None:
    assert noise_for(PrivacyEngine, **options) == noise_for(OpacusPrivacyEngine, **options) > 0


@pytest.mark.filterwarnings("ignore:Optimal order:UserWarning")
def test_options_of_the_search_the_accountant_and_make_private_can_be_mixed() -> None:
    loose = noise_for(PrivacyEngine, epsilon_tolerance=1.0, alphas=[8.0, 16.0], fused=False, poisson_sampling=False)
    assert loose > noise_for(PrivacyEngine)
    assert noise_for(PrivacyEngine, accountant="prv", eps_error=0.1) > 0


def test_a_budget_that_is_partly_spent_is_said() -> None:
    engine = PrivacyEngine()
    engine.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    model = make_model()
    with pytest.warns(UserWarning, match="larger than target_epsilon"):
        engine.make_private_with_epsilon(
            module=model,
            optimizer=sgd(model),
            data_loader=make_loader(),
            target_epsilon=3.0,
            target_delta=1e-5,
            epochs=1,
            max_grad_norm=1.0,
            epsilon_tolerance=1.0,
        )


SCALARS = {
    "int": int,
    "float32": np.float32,
    "float64": np.float64,
    "int64": np.int64,
    "0-d array": np.asarray,
    "tensor": torch.tensor,
    "double tensor": lambda value: torch.tensor(value, dtype=torch.float64),
}


@pytest.mark.parametrize("name", SCALARS)
def test_scalars_of_numpy_and_torch_are_numbers(name: str) -> None:
    model = make_model()
    one = SCALARS[name](1)
    _, optimizer, _ = make_private(model, sgd(model), max_grad_norm=one, noise_multiplier=one)
    for value in (optimizer.max_grad_norm, optimizer.noise_multiplier, optimizer.engine.max_grad_norm):
        assert (type(value), value) == (float, 1.0)


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(1), "1.0", None, float("nan"), np.float32("inf")])
@pytest.mark.parametrize("name", ["max_grad_norm", "noise_multiplier"])
def test_what_is_not_one_number_is_refused(name: str, value: object) -> None:
    model = make_model()
    with pytest.raises(UserError, match=f"{name} must be"):
        make_private(model, sgd(model), **{name: value})


# -- once more ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poisson", [True, False])
def test_make_private_on_its_own_outputs_starts_anew_with_the_same_accountant(poisson: bool) -> None:
    engine = PrivacyEngine()
    model = make_model()
    first = make_private(model, sgd(model), engine, max_grad_norm=0.1, poisson_sampling=poisson)
    x, y = make_data().tensors
    step(*first[:2], x[:16], y[:16])
    private, optimizer, _ = make_private(*first[:2], engine, first[2], poisson_sampling=poisson)
    model.load_state_dict(make_model().state_dict())
    before = [p.detach().clone() for p in model.parameters()]
    step(private, optimizer, x[:16], y[:16])
    for got, expected in zip(moved(before, model), clipped_mean(x[:16], y[:16], divisor=16), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
    assert sum(steps for _, _, steps in engine.accountant.history) == 2
    with pytest.raises(UserError, match="detached"):  # the optimizer of the first call
        step(private, first[1], x[:16], y[:16])


def test_a_second_private_optimizer_on_one_model_is_refused() -> None:
    model = make_model()
    body, head = (torch.optim.SGD(part.parameters(), lr=1.0) for part in (model[0], model[3]))
    with pytest.warns(UserWarning, match="not in the optimizer"):
        private, _, loader = make_private(model, body)
    with pytest.raises(UserError, match="parameter groups"):
        make_private(private, head)
    with pytest.raises(UserError, match="parameter groups"):
        make_private(nn.Sequential(private, nn.Flatten()), head)
    x, y = next(iter(loader))
    F.cross_entropy(private(x), y).backward()  # the first one is as it was
    assert private[0].weight.grad is None


def test_a_refusal_at_the_first_batch_is_opacus_error_as_well():
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, 2)

        def forward(self, x):
            y = self.layer(x)
            return y - y.mean(0)

    model = Mixing()
    private, *_ = make_private(model, sgd(model), PrivacyEngine())
    with pytest.raises(UnsupportedModuleError, match="samples") as refusal:
        private(torch.randn(4, FEATURES))
    assert isinstance(refusal.value, UserError)
