"""What autograd saves is an activation until autograd lets go of it, whoever else holds it then."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpscope.instruments.memory import Tracker, attribute, model_holdings
from dpscope.instruments.memory.record import RELEASED
from dpscope.vocabulary.phases import phase
from tests.unit.instruments.memory.tracked import linear_chain, use_of


def test_activations_are_what_autograd_saves_until_it_lets_go():
    model, x = linear_chain(), torch.randn(4, 8)
    after_forward = []

    def step():
        y = model(x)
        after_forward.append(len(tracker.record.events))
        y.sum().backward()

    tracker = Tracker(
        "cpu", model, lambda: [("inputs", "", x), *model_holdings(model, torch.optim.SGD(model.parameters()))]
    )
    with tracker.tracking() as record:
        step()
    use = attribute(record)
    place = use.components.index("activations")
    # Saved: the hidden layer's output after ReLU (which keeps its own result, the second Linear its input: the same
    # storage). The output of the first Linear is gone, x belongs to the inputs.
    assert use.points[after_forward[0] - 1][place] == 4 * 32 * 4
    assert use.points[-1][place] == 0
    gradients = use.components.index("gradients")
    assert use.points[-1][gradients] == sum(p.numel() for p in model.parameters()) * 4


def test_what_autograd_lets_go_of_and_somebody_holds_is_no_longer_an_activation():
    held = []

    def step():
        x = torch.ones(256, requires_grad=True)
        y = x.exp()  # saves its result
        held.append(y.detach())
        y.sum().backward()

    use = use_of(step)
    y = next(life for life in use.record.lives if life.birth.operator == "aten::exp")
    assert use.belongings[y.index] == ("activations", "temp_matrices")
    assert use.releases[y.index] is not None
    assert use.points[-1][use.components.index("temp_matrices")] >= 256 * 4


def test_what_autograd_saves_again_is_an_activation_until_it_lets_go_for_the_last_time():
    def step():
        x = torch.ones(64, requires_grad=True)
        factor = torch.full((64,), 2.0)
        for _ in range(2):
            (x * factor).sum().backward()  # saves it, and lets go
        return factor

    use = use_of(step)
    (factor,) = [life for life in use.record.lives if life.birth.operator == "aten::full"]
    let_go = [i for i, (kind, index, _) in enumerate(use.record.events) if (kind, index) == (RELEASED, factor.index)]
    assert len(let_go) == 2
    assert use.releases[factor.index] == let_go[1]


def test_what_a_method_keeps_beyond_autograd_is_a_hook_after_autograd_let_go():
    held = []

    def step():
        x = torch.ones(256, requires_grad=True)
        y = x.exp()
        held.append(y.detach())
        with phase("backward"):
            y.sum().backward()

    use = use_of(step, holdings=lambda: [("activation_hooks", "layer", tensor) for tensor in held])
    y = next(life for life in use.record.lives if life.birth.operator == "aten::exp")
    assert use.belongings[y.index] == ("activations", "activation_hooks")
    assert y.module == "layer"
    assert use.points[-1][use.components.index("activation_hooks")] == 256 * 4


def test_a_saved_tensor_stays_the_object_it_was():
    """As without the tracker: whoever refers to it weakly still finds it."""
    found = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            cast = x.double()
            ctx.save_for_backward(cast)
            found.append(weakref.ref(cast))
            return cast.float()

        @staticmethod
        def backward(ctx, g):
            assert found[0]() is not None
            return g

    x = torch.ones(4, requires_grad=True)
    use_of(lambda: Keeps.apply(x).sum().backward())
    assert found[0]() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_frees_activations_and_makes_them_again(reentrant):
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(4))
    x = torch.randn(64, 32, requires_grad=True)

    def step(saving):
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=reentrant) if saving else block(y)
        with phase("backward"):
            y.sum().backward()
        blocks.zero_grad()

    def activations(use):
        return max(point[use.components.index("activations")] for point in use.points)

    def holdings():
        return [("inputs", "", x), *model_holdings(blocks, torch.optim.SGD(blocks.parameters()))]

    plain = use_of(lambda: step(False), model=blocks, holdings=holdings)
    saved = use_of(lambda: step(True), model=blocks, holdings=holdings)
    one_block = 2 * 64 * 256 * 4  # of Linear and GELU
    assert activations(plain) >= 4 * one_block
    assert one_block <= activations(saved) < 2 * one_block
    again = [life for life in saved.record.lives if life.birth.recomputed]
    assert {life.birth.phase for life in again} == {"backward"}
    assert {life.birth.module for life in again} >= {"0.0", "3.0"}
    assert not any(life.birth.recomputed for life in plain.record.lives)
    if not reentrant:  # checkpointing leaves a forward in its middle once it has what it needs
        weights = [
            life for life in saved.record.lives if life.owner == "gradients" and life.birth.operator == "aten::mm"
        ]
        assert len(weights) == 8
        assert [life.birth.module for life in weights] == [life.module for life in weights]


@pytest.mark.parametrize(("saved", "component"), [(True, "activations"), (False, "temp_matrices")])
def test_autocast_casts_of_weights_are_activations_where_autograd_saves_them(saved, component):
    """The gradient of x needs the weight, so its cast is saved; without one it lives until autocast's cache ends."""
    model, x = nn.Linear(64, 64, bias=False), torch.randn(4, 64, requires_grad=saved)

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            again = model(x)  # the cast is cached
        (y + again).float().sum().backward()

    use = use_of(step, model=model)
    casts = [life for life in use.record.lives if life.birth.dtype == "bfloat16" and life.birth.shape == (64, 64)]
    (weight,) = [life for life in casts if life.birth.operator == "aten::_to_copy"]
    assert use.belongings[weight.index][0] == component


def test_a_module_called_twice_and_a_tied_weight_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 16, bias=False)
            self.b = nn.Linear(16, 16, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(self.a(x)))

    model, x = Tied(), torch.randn(4, 16)
    optimizer = torch.optim.SGD(model.parameters())
    use = use_of(lambda: model(x).sum().backward(), model=model, holdings=lambda: model_holdings(model, optimizer))
    parameters, gradients = (use.components.index(key) for key in ("model_parameters", "gradients"))
    assert {point[parameters] for point in use.points} == {16 * 16 * 4}
    assert use.points[-1][gradients] == 16 * 16 * 4
    assert {life.birth.module for life in use.record.lives} >= {"a", "b"}
