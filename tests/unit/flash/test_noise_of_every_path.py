"""The noise of an element is a function of the step's key and the element's number, by whatever path it is added."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from dpscope.flash import FlashEngine
from dpscope.flash.kernels.tensor_lists import noise_starts
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
from dpscope.flash.update import optimizer as fused
from dpscope.flash.update.noise_source import NoiseSource
from tests.unit.flash.kernels.noise_values import noise_values

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(nn.Module):
    """Parameters that come to the update in different ways: sums of products and of an embedding, small rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 5)
        self.first, self.norm = nn.Linear(5, 6), nn.LayerNorm(6)
        self.second = nn.Linear(6, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, ids):
        return self.second(self.norm(self.first(self.tokens(ids)))) * self.scale


class Plain(nn.Module):
    """The same without a bare parameter, so that layers are not run by vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 5)
        self.first, self.norm = nn.Linear(5, 6), nn.LayerNorm(6)
        self.second = nn.Linear(6, 3, bias=False)

    def forward(self, ids):
        return self.second(self.norm(self.first(self.tokens(ids))))


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1.0),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=False),
}


def train(make, optimizer, *, fused, batches=(3, 3), frozen=(), groups=False, steps=2):
    """The parameters after steps with noise from one seed; clipped sums are tiny beside it."""
    torch.manual_seed(0)
    model = make()
    parameters = list(model.parameters())
    given = [{"params": parameters[:2]}, {"params": parameters[2:]}] if groups else parameters
    private = DPFlashOptimizer(
        OPTIMIZERS[optimizer](given),
        engine=FlashEngine(model, max_grad_norm=1e-6),
        noise_multiplier=1e6,
        max_grad_norm=1e-6,
        expected_batch_size=2,
        generator=torch.Generator().manual_seed(5),
        fused=fused,
    )
    for index in frozen:
        parameters[index].requires_grad_(False)
    for batch in itertools.islice(itertools.cycle(batches), steps):
        private.zero_grad()
        model(torch.randint(0, 7, (batch, 4))).sin().mean().backward()
        private.step()
    return parameters


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [Model, Plain])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("groups", [False, True])
def test_the_fused_update_and_the_plain_one_add_the_same_noise(make, optimizer, groups):
    assert_same(train(make, optimizer, fused=True, groups=groups), train(make, optimizer, fused=False, groups=groups))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [Model, Plain])
def test_the_batch_does_not_change_the_noise(make, fused):
    """One sample's gradient goes to the update as it is, those of several as sums, and in another order."""
    assert_same(train(make, "sgd", fused=fused, batches=(1,)), train(make, "sgd", fused=fused, batches=(4,)))


@pytest.mark.parametrize("fused", [False, True])
def test_what_else_is_frozen_does_not_change_the_noise(fused):
    everything = train(Plain, "sgd", fused=fused)
    some = train(Plain, "sgd", fused=fused, frozen=(0, 3))
    trained = [1, 2, 4, 5]
    assert_same([everything[i] for i in trained], [some[i] for i in trained])


def test_how_many_launches_an_update_takes_does_not_change_the_noise(monkeypatch):
    together = train(Plain, "adamw", fused=True)
    monkeypatch.setattr(fused, "GROUP_BYTES", 1)
    assert_same(train(Plain, "adamw", fused=True), together)


@pytest.mark.parametrize("fused", [False, True])
def test_the_noise_of_a_step_is_one_key_and_numbers_in_the_order_of_the_parameters(fused):
    parameters = train(Plain, "sgd", fused=fused, steps=1)
    torch.manual_seed(0)
    before = list(Plain().parameters())
    key = NoiseSource(torch.Generator().manual_seed(5)).draw()
    for old, new, start in zip(before, parameters, noise_starts(parameters), strict=True):
        torch.testing.assert_close(old - new, noise_values(old.shape, *key, first=start) / 2, rtol=1e-4, atol=1e-5)


def test_a_parameter_keeps_its_number_when_others_are_added():
    source = NoiseSource()
    first, second, third = (nn.Parameter(torch.zeros(size)) for size in (5, 2, 9))
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    assert dict(source.starts(optimizer)) == {id(first): 0, id(second): 8}
    optimizer.add_param_group({"params": [third]})
    assert dict(source.starts(optimizer)) == {id(first): 0, id(second): 8, id(third): 12}
