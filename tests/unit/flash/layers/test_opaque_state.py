"""What a unit keeps beside its outputs: buffers, values on modules, complex numbers."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from dpscope.errors import UserError
from dpscope.flash import FlashEngine, run_oracle
from tests.unit.flash.agreement import assert_exact, private_step
from tests.unit.flash.flash_models import sine_losses
from tests.unit.flash.layers.whole_units import whole

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


# -- state -------------------------------------------------------------------------------------------------------------


class RunningMean(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.ones(6))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        new = 0.9 * self.mean + 0.1 * x.detach().reshape(-1, 6).mean(0)
        if self.training:
            if self.how == "in place":
                self.mean.copy_(new)
            elif self.how == "by a loop":
                self.mean = self.mean + 0.0 * x.sum().item()
                self.mean = new
            else:
                self.mean = new
        return x * self.weight - self.mean * 0


@pytest.mark.parametrize("how", ["in place", "assigned", "by a loop"])
def test_a_buffer_made_of_the_samples_is_refused(how):
    model = nn.Sequential(nn.Linear(6, 6), RunningMean(how))
    with FlashEngine(model, max_grad_norm=1.0):
        with pytest.raises(UserError, match=r"1.*buffer.* from the samples"):
            model(torch.randn(4, 6))
        model.eval()
        model(torch.randn(4, 6))


class Centring(nn.Module):
    """No parameters: no tap stands in for it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("cache", torch.zeros(6), persistent=False)

    def forward(self, x):
        self.calls += 1
        self.cache = torch.arange(6.0)
        if self.training and self.how == "in place":
            self.mean.lerp_(x.detach().mean(0), 0.1)
        elif self.training and self.how == "assigned":
            self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        return x + self.cache


@pytest.mark.parametrize("how", ["in place", "assigned", "not at all"])
def test_a_running_mean_in_a_module_without_parameters_is_refused(how):
    model = nn.Sequential(nn.Linear(6, 6), Centring(how))
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        if how != "not at all":
            with pytest.raises(UserError, match=r"1\.mean is a buffer that forward computes from the samples"):
                model(torch.randn(4, 6))
            model.eval()
        for _ in range(2):
            private_step(engine, {"x": torch.randn(4, 6)}, sine_losses)


def test_buffers_of_a_parametrisation_are_updated_once_a_step():
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, weight):
            self.steps += 1
            return weight - weight.mean()

    model = nn.Sequential(nn.Linear(6, 6))
    parametrize.register_parametrization(model[0], "weight", Centred())
    before = int(model[0].parametrizations.weight[0].steps)
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, {"x": torch.randn(4, 6)}, sine_losses)
    assert int(model[0].parametrizations.weight[0].steps) == before + 1  # once a step, not once a sample


def test_a_spectral_norm_is_exact_and_takes_one_power_iteration_a_step():
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 5)))
    state = model[0].parametrizations.weight[0]
    x = torch.randn(4, 6)
    state._u.normal_()
    before = state._u.clone(), state._v.clone()
    model(x)
    once = state._u.clone()
    state._u.copy_(before[0])
    state._v.copy_(before[1])
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, {"x": x}, sine_losses)
        torch.testing.assert_close(state._u, once)
    for _ in range(100):
        model(x)
    assert_exact(model, {"x": x}, sine_losses)


class Router(nn.Module):
    """Leaves an auxiliary loss on the module, in different ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.ones(6))
        self.auxiliary, self.losses, self.box = None, [], Box()

    def forward(self, x):
        auxiliary = (x * self.weight).square().sum()
        if self.how.startswith("loop"):
            auxiliary.item()
        if self.how.endswith("attribute"):
            self.auxiliary = auxiliary
        elif self.how.endswith("list"):
            self.losses.append(auxiliary)
        elif self.how.endswith("object"):
            self.box.loss = auxiliary
        elif self.how.endswith("number"):
            self.auxiliary = auxiliary.item()
        elif self.how.endswith("detached"):
            self.auxiliary = auxiliary.detach()
        return x * self.weight


class Box:
    loss = None


@pytest.mark.parametrize(
    "how", ["attribute", "list", "object", "detached", "loop attribute", "loop list", "loop object", "loop number"]
)
def test_a_value_of_each_sample_left_on_a_module_that_runs_by_sample_is_refused(how):
    model = nn.Sequential(nn.Linear(6, 6), whole(Router(how)))
    with FlashEngine(model, max_grad_norm=1.0):
        with pytest.raises(UserError, match=r"1 \(Router\) keeps (auxiliary|losses|box) .*return it from forward"):
            model(torch.randn(3, 6))
        assert model[1].auxiliary is None and model[1].losses == [] and model[1].box.loss is None


def test_state_that_depends_on_no_sample_is_written_once():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.calls, self.positions = nn.Parameter(torch.ones(6)), 0, None

        def forward(self, x):
            self.calls += 1
            self.positions = torch.arange(x.shape[-1])
            return x * self.weight + self.positions

    model = nn.Sequential(nn.Linear(6, 6), Counting())
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        for steps in (1, 2, 3):
            private_step(engine, {"x": torch.randn(4, 6)}, sine_losses)
            assert model[1].calls == steps
    assert model[1].positions.tolist() == list(range(6))


# -- complex numbers ---------------------------------------------------------------------------------------------------


class Spectral(nn.Module):
    def __init__(self, *, trainable: bool = True) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(6, 6), nn.Module()
        self.inner.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64), requires_grad=trainable)

    def forward(self, x):
        return self.linear(torch.fft.irfft(torch.fft.rfft(x) * self.inner.filter, 6))


def test_complex_parameters_are_refused_by_name_unless_they_are_frozen():
    with pytest.raises(UserError, match=r"filter.*complex.*view_as_complex"):
        FlashEngine(Spectral(), max_grad_norm=1.0)
    model, batch = Spectral(trainable=False), {"x": torch.randn(3, 6)}
    truth = run_oracle(model, batch, lambda m, b: sine_losses(m, b).sum(), max_grad_norm=1.0).clipped_sums
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        private_step(engine, batch, sine_losses)
        torch.testing.assert_close(model.linear.weight.grad, truth["linear.weight"])
        model.zero_grad()
        model.inner.filter.requires_grad_(True)
        with pytest.raises(UserError, match="filter"):
            private_step(engine, {"x": torch.randn(3, 6)}, sine_losses)


def test_complex_numbers_made_of_real_parameters_are_exact():
    class Real(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(4, 2))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x) * torch.complex(self.filter[:, 0], self.filter[:, 1]), 6)

    assert_exact(nn.Sequential(nn.Linear(6, 6), Real()), {"x": torch.randn(3, 6)}, sine_losses)
