"""Whatever changes between replays takes effect in the next call, as in the loop, or is refused as there."""

import copy
import warnings

import pytest
import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import Automatic, make_graphed_step
from tests.unit.flash.graphed.loops import (
    CHANGED,
    CLASSES,
    WIDTH,
    assert_same,
    assert_trains_alike,
    batches,
    loss_of,
    network,
    private,
    trained_by_graph,
    trained_by_loop,
)


class Tuned(nn.Module):
    """A layer whose output depends on everything a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.act, self.head = nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)
        self.power, self.shift, self.function = 1.0, torch.tensor(0.1), torch.sin
        self.options = {"scale": 2.0}
        self.register_buffer("gain", torch.ones(8))

    def forward(self, x):
        y = self.act(self.layer(x)) * (self.gain if self.training else 3.0) + self.shift
        return self.head(self.function(y) * self.power * self.options["scale"])


def halve(module, *_):
    return 0.5 * _[-1]


def shrink(optimizer, *_):
    with torch.no_grad():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.mul_(0.5)


CHANGES = {
    "a number": lambda model, opt: setattr(model, "power", 3.0),
    "a tensor": lambda model, opt: setattr(model, "shift", torch.tensor(1.0)),
    "a function": lambda model, opt: setattr(model, "function", torch.cos),
    "an entry of a dictionary": lambda model, opt: model.options.update(scale=0.5),
    "a buffer": lambda model, opt: setattr(model, "gain", torch.full((8,), 2.0)),
    "a buffer in place": lambda model, opt: model.gain.mul_(2.0),
    "a submodule": lambda model, opt: setattr(model, "act", nn.Sigmoid()),
    "another submodule's place": lambda model, opt: model.add_module("act", nn.ReLU()),
    "data": lambda model, opt: setattr(model.layer.weight, "data", 2 * model.layer.weight.data),
    "data in place": lambda model, opt: model.layer.weight.data.mul_(2.0),
    "a forward hook": lambda model, opt: model.act.register_forward_hook(halve),
    "a forward pre-hook": lambda model, opt: model.act.register_forward_pre_hook(lambda m, args: (0.5 * args[0],)),
    "a mode": lambda model, opt: model.eval(),
    "a frozen layer": lambda model, opt: model.layer.requires_grad_(False),
    "a learning rate": lambda model, opt: opt.param_groups[0].update(lr=0.5),
    "weight decay": lambda model, opt: opt.param_groups[0].update(weight_decay=0.3),
    "betas": lambda model, opt: opt.param_groups[0].update(betas=(0.5, 0.9)),
    "maximize": lambda model, opt: opt.param_groups[0].update(maximize=True),
    "noise off": lambda model, opt: setattr(opt, "noise_multiplier", 0.0),
    "a hook after the update": lambda model, opt: opt.original_optimizer.register_step_post_hook(shrink),
    "a hook before the update": lambda model, opt: opt.original_optimizer.register_step_pre_hook(shrink),
    "a rate as a tensor": lambda model, opt: opt.param_groups[0].update(lr=torch.tensor(0.5)),
    "the expected batch size": lambda model, opt: setattr(opt, "expected_batch_size", 400),
    "the optimizer's reduction": lambda model, opt: setattr(opt, "loss_reduction", "sum"),
    "the engine's reduction": lambda model, opt: setattr(opt.engine, "loss_reduction", "sum"),
    "a loss scale": lambda model, opt: setattr(opt.engine, "loss_scale", 1000.0),
    "another rule": lambda model, opt: setattr(opt.engine, "clip", Automatic(0.1)),
    "other noise": lambda model, opt: setattr(opt.noise, "generator", torch.Generator().manual_seed(77)),
    "no state": lambda model, opt: opt.original_optimizer.state.clear(),
    "a smaller group": lambda model, opt: opt.param_groups[0]["params"].pop(),
    "a bound": lambda model, opt: setattr(opt, "max_grad_norm", 0.01),
}


def trained(model, optimizer, by_graph, change, at=CHANGED):
    def between(number, each):
        if number == at:
            change(model, each)

    if by_graph:
        return trained_by_graph(model, optimizer, list(batches()), between)[0]
    trained_by_loop(model, optimizer, list(batches()), between)
    return None


@pytest.fixture(scope="module")
def unchanged():
    """The model after the same steps without a change. Where the update runs makes no difference."""
    model = Tuned()
    trained(model, private(model), False, lambda *_: None)
    return model


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_takes_effect_in_the_next_call(host_graphs, unchanged, change):
    by_loop, by_graph = Tuned(), Tuned()
    trained(by_loop, private(by_loop), False, change)
    step = trained(by_graph, private(by_graph), True, change)
    assert_same(by_loop, by_graph)
    assert step.replays >= 4
    with pytest.raises(AssertionError):  # the change changes something
        assert_same(unchanged, by_graph)


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_is_noticed(host_graphs, kind):
    called = []

    def change(model, _):
        getattr(model.act, kind)(lambda *args: called.append(1))

    model = Tuned()
    trained(model, private(model), True, change)
    assert called
    assert host_graphs.captures == 2


def test_a_hook_in_the_place_of_another_is_noticed(host_graphs):
    def with_two_hooks(model, optimizer, by_graph):
        first = model.act.register_forward_hook(halve)

        def change(model, _):
            first.remove()
            model.act.register_forward_hook(lambda module, args, output: 2 * output)

        trained(model, optimizer, by_graph, change)

    by_loop, by_graph = Tuned(), Tuned()
    with_two_hooks(by_loop, private(by_loop), False)
    with_two_hooks(by_graph, private(by_graph), True)
    assert_same(by_loop, by_graph)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model, _: model.layer.weight.register_hook(lambda g: g), "gradient hook"),
        (lambda model, _: setattr(model.layer, "weight", nn.Parameter(torch.zeros(8, WIDTH))), "replaced"),
        (lambda model, opt: setattr(opt, "noise_multiplier", -1.0), "noise_multiplier"),
        (lambda model, opt: opt.engine.detach(), "detached"),
    ],
    ids=["a parameter's hook", "a parameter", "noise below zero", "a detached engine"],
)
def test_what_the_loop_refuses_is_refused(host_graphs, change, reason):
    model = Tuned()
    with pytest.raises(UserError, match=reason):
        trained(model, private(model), True, change)


@pytest.mark.parametrize("copied", [True, False])
def test_state_that_is_loaded_between_replays_is_used(host_graphs, copied):
    """A state that was not copied holds the optimizer's own tensors: only its groups, with their rates, are new."""

    def with_saved_state(model, by_graph):
        saved = []

        def between(number, optimizer):
            inner = optimizer.original_optimizer
            inner.param_groups[0]["lr"] = 0.01 * (1 + number % 3)
            if number == 3:
                found = {k: v for k, v in inner.state_dict().items() if k in ("state", "param_groups")}
                saved.append(copy.deepcopy(found) if copied else found)
            if number == 7:
                inner.load_state_dict(saved[0])

        if by_graph:
            trained_by_graph(model, private(model), list(batches()), between)
        else:
            trained_by_loop(model, private(model), list(batches()), between)

    by_loop, by_graph = network(), network()
    with_saved_state(by_loop, False)
    with_saved_state(by_graph, True)
    assert_same(by_loop, by_graph)


def test_a_scheduler_sets_the_rate_of_replays(host_graphs):
    schedulers = {}

    def between(number, optimizer):
        inner = optimizer.original_optimizer
        if number == 0:
            schedulers[inner] = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (1 + step))
        else:
            schedulers[inner].step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch asks whether the private optimizer steps: it does, by a kernel
        assert_trains_alike(host_graphs, private, batches, between)
    assert host_graphs.captures == 1


def test_autocast_around_the_step_is_noticed(host_graphs):
    model = network()
    step = make_graphed_step(loss_of(model), private(model))
    data = list(batches(8))
    for x, y in data[:6]:
        step(x, y)
    before = step.replays
    with torch.autocast("cpu", torch.bfloat16):
        step(*data[6])
        assert step.replays == before
        assert step._captured == {}


# -- other steps in between --------------------------------------------------------------------------------------------


def test_a_backward_pass_by_hand_is_added_to(host_graphs):
    models = []
    for graphed in (False, True):
        model = network()
        optimizer = private(model)
        step = make_graphed_step(loss_of(model), optimizer)
        for number, (x, y) in enumerate(batches(16)):
            if graphed and number % 8 != 4:
                step(x, y)
                continue
            loss_of(model)(x, y).backward()
            if number % 8 != 4:
                optimizer.step()
                optimizer.zero_grad()
        models.append(model)
    assert_same(*models)


def test_warming_up_changes_nothing_and_the_first_call_is_a_replay(host_graphs):
    by_loop, by_graph = network(0.3), network(0.3)
    torch.manual_seed(3)
    trained_by_loop(by_loop, private(by_loop), list(batches(6)))
    torch.manual_seed(3)
    optimizer = private(by_graph)
    counted = []
    optimizer.attach_step_hook(lambda each: counted.append(1))
    step = make_graphed_step(loss_of(by_graph), optimizer)
    data = list(batches(6))
    torch.manual_seed(3)
    list(batches(6))
    step.warm_up(*data[0])
    optimizer.engine.verification.schedule.pause()
    for x, y in data:
        step(x, y)
    assert step.replays == 6
    assert len(counted) == 6
    assert_same(by_loop, by_graph)


def test_norms_that_were_taken_are_not_written_again(host_graphs):
    model = network()
    optimizer = private(model)
    step = make_graphed_step(loss_of(model), optimizer)
    taken = []
    for x, y in batches(8):
        step(x, y)
        taken.append((optimizer.engine.norms, optimizer.engine.norms.clone()))
    assert all(torch.equal(norms, before) for norms, before in taken)
    assert step.replays >= 4


def without_python(step):
    """Let replays run no Python at all, as those of a graph, and none be looked at."""
    step.engine.verification.schedule.pause()
    for captured in step._captured.values():
        captured._replay = lambda: None


def test_a_parameter_s_hook_is_refused_before_a_replay(host_graphs):
    model = network()
    step = make_graphed_step(loss_of(model), private(model))
    data = list(batches(7))
    for x, y in data[:6]:
        step(x, y)
    without_python(step)
    model[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(UserError, match="gradient hook"):
        step(*data[6])


def test_a_replay_reads_no_counter_from_the_device(host_graphs, monkeypatch):
    model = network()
    step = make_graphed_step(loss_of(model), private(model))
    data = list(batches(8))
    for x, y in data[:6]:
        step(x, y)
    before = step.replays
    without_python(step)
    monkeypatch.setattr(torch.Tensor, "__int__", lambda self: pytest.fail("waits for the device"))
    for x, y in data[6:]:
        step(x, y)
    assert step.replays == before + 2


def test_a_capture_reads_no_counter_from_the_device(host_graphs, monkeypatch):
    model = network()
    optimizer = private(model)
    step = make_graphed_step(loss_of(model), optimizer)
    data = list(batches(2))
    step.warm_up(*data[0])
    make = optimizer.make_captured_update

    def made():
        found = make()
        monkeypatch.setattr(torch.Tensor, "__int__", lambda self: pytest.fail("waits for the device"))
        return found

    optimizer.make_captured_update = made
    optimizer.engine.verification.schedule.pause()
    for x, y in data:
        step(x, y)
    assert step.replays == 2


def test_a_key_serves_one_replay(host_graphs, fused):
    model = network()
    step = make_graphed_step(loss_of(model), private(model))
    for x, y in batches(6):
        step(x, y)
    (captured,) = step._captured.values()
    assert (captured.update is not None) == bool(fused)
    if fused:
        captured._replay()
        assert all(parameter.isnan().all() for parameter in model.parameters())
