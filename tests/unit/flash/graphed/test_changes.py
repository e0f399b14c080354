"""Whatever changes between replays takes effect in the next call, as in the loop, or is refused as there."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import DPFlashOptimizer, FlashEngine, make_graphed_step
from dpscope.flash.torch_side.captures import OwnCapture, capturing, device_cache
from tests.unit.flash.graphed.loops import (
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

CHANGED = 6  # the step before which things change: steps 5 and 6 are replays


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


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_takes_effect_in_the_next_call(host_graphs, change):
    by_loop, by_graph, unchanged = Tuned(), Tuned(), Tuned()
    trained(by_loop, private(by_loop), False, change)
    trained(unchanged, private(unchanged), False, lambda *_: None)
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


def test_state_that_is_loaded_between_replays_is_used(host_graphs):
    def with_saved_state(model, by_graph):
        saved = []

        def between(number, optimizer):
            inner = optimizer.original_optimizer
            if number == 3:
                saved.append(
                    copy.deepcopy({k: v for k, v in inner.state_dict().items() if k in ("state", "param_groups")})
                )
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


# -- the loss ----------------------------------------------------------------------------------------------------------


class Weighted:
    """A loop of the user's: its loss reads one attribute, and it counts its steps in another."""

    def __init__(self, model) -> None:
        self.model, self.weight, self.number = model, 1.0, 0

    def loss(self, x, y):
        return self.weight * F.cross_entropy(self.model(x), y)


def losses_of(model, kind):
    """Return a loss function and what sets the number that it reads."""
    if kind == "an attribute":
        loop = Weighted(model)

        def set_to(value):
            loop.weight, loop.number = value, loop.number + 1

        return loop.loss, set_to
    weight = 1.0
    options = {"weight": 1.0}

    def closure(x, y):
        return weight * F.cross_entropy(model(x), y)

    def set_to(value):
        nonlocal weight
        weight = options["weight"] = value

    return closure, set_to


@pytest.mark.parametrize("kind", ["an attribute", "a variable"])
def test_a_number_that_the_loss_reads_is_noticed(host_graphs, kind):
    models = []
    for graphed in (False, True):
        model = network()
        optimizer = private(model)
        loss, set_to = losses_of(model, kind)
        step = make_graphed_step(loss, optimizer)
        for number, (x, y) in enumerate(batches()):
            set_to(1.0 if number < CHANGED else 0.001)
            if graphed:
                step(x, y)
            else:
                loss(x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
        models.append(model)
    assert_same(*models)
    assert step.replays >= 5
    assert host_graphs.captures == 2


def test_a_number_that_changes_in_every_step_is_warned_of(host_graphs):
    model = network()
    loss, set_to = losses_of(model, "a variable")
    step = make_graphed_step(loss, private(model))
    with pytest.warns(UserWarning, match="as tensors, among its arguments"):
        for number, (x, y) in enumerate(batches(40)):
            set_to(1.0 / (1 + number))
            step(x, y)


def test_tensors_and_numbers_among_the_arguments_are_those_of_the_call(host_graphs):
    models = []
    for graphed in (False, True):
        model = network()
        optimizer = private(model)

        def loss(x, y, *, scale, mode, model=model):
            found = F.cross_entropy(model(x), y)
            return scale * found if mode == "plain" else 3.0 * scale * found

        step = make_graphed_step(loss, optimizer)
        for number, (x, y) in enumerate(batches(24)):
            given = {"scale": torch.tensor(1.0 / (1 + number)), "mode": "plain" if number % 2 else "triple"}
            if graphed:
                step(x, y, **given)
            else:
                loss(x, y, **given).backward()
                optimizer.step()
                optimizer.zero_grad()
        models.append(model)
    assert_same(*models)
    assert host_graphs.captures == 2


def test_one_tensor_given_twice_has_a_graph_of_its_own(host_graphs):
    models = []
    for graphed in (False, True):
        model = network()
        optimizer = private(model)
        loss = lambda x, z, y, model=model: F.cross_entropy(model(x) + model(z), y)  # noqa: E731
        step = make_graphed_step(loss, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # two views of a sample
            for number, (x, y) in enumerate(batches(20)):
                z = x if number < 6 else x + 1
                if graphed:
                    step(x, z, y)
                else:
                    loss(x, z, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        models.append(model)
    assert_same(*models)


def test_a_packed_sequence_is_refused(host_graphs):
    model = network()
    step = make_graphed_step(loss_of(model), private(model))
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, WIDTH), torch.randn(2, WIDTH)])
    with pytest.raises(UserError, match="packed sequence"):
        step(packed, torch.zeros(2))


class Counts(nn.Module):
    """A model that counts its passes: in a buffer that it writes or replaces, or in a number."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.number, self.layer = way, 0, nn.Linear(WIDTH, CLASSES)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.way == "writes":
            self.seen += 1.0
        elif self.way == "replaces":
            self.seen = self.seen + 1.0
        else:
            self.number += 1
        return self.layer(x)


def test_a_buffer_that_forward_writes_counts_replays(host_graphs):
    by_loop, by_graph = Counts("writes"), Counts("writes")
    trained_by_loop(by_loop, private(by_loop), list(batches()))
    step, _ = trained_by_graph(by_graph, private(by_graph), list(batches()))
    assert float(by_graph.seen) == float(by_loop.seen)
    assert step.replays


@pytest.mark.parametrize(("way", "name"), [("replaces", "seen"), ("counts", "number")])
def test_what_only_python_can_change_is_refused_by_name(host_graphs, way, name):
    model = Counts(way)
    with pytest.raises(UserError, match=name):
        trained_by_graph(model, private(model), list(batches()))


# -- other steps in between --------------------------------------------------------------------------------------------


def test_a_backward_pass_by_hand_is_added_to(host_graphs):
    models = []
    for graphed in (False, True):
        model = network()
        optimizer = private(model)
        step = make_graphed_step(loss_of(model), optimizer)
        for number, (x, y) in enumerate(batches(16)):
            if graphed and number % 8 != 6:
                step(x, y)
                continue
            loss_of(model)(x, y).backward()
            if number % 8 != 6:
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
    optimizer.engine.rehearsals.schedule.pause()
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


def test_a_replay_reads_no_counter_from_the_device(host_graphs, monkeypatch):
    model = network()
    step = make_graphed_step(loss_of(model), private(model))
    data = list(batches(7))
    for x, y in data[:6]:
        step(x, y)
    before = step.replays
    monkeypatch.setattr(torch.Tensor, "__int__", lambda self: pytest.fail("waits for the device"))
    step(*data[6])
    assert step.replays == before + 1


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
    optimizer.engine.rehearsals.schedule.pause()
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


# -- rules and rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipping", ["normalised", "psac", "adaptive"])
def test_other_rules_are_those_of_the_loop(host_graphs, clipping):
    def make(model):
        optimizer = private(model, clipping=clipping)
        optimizer.engine.clip.count_noise = lambda: 0.0  # drawn from the operating system
        return optimizer

    assert_trains_alike(host_graphs, make, batches)


def test_rows_of_one_sample_are_those_of_the_loop(host_graphs):
    def make(model):
        engine = FlashEngine(model, max_grad_norm=0.5, rows_per_sample=2)
        noise = torch.Generator().manual_seed(5)
        options = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, "expected_batch_size": 2}
        return DPFlashOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), engine=engine, generator=noise, **options)

    step = assert_trains_alike(host_graphs, make, batches)
    assert step.engine.norms.shape == (2,)


def test_rows_of_one_user_run_eagerly(host_graphs):
    model = network()
    optimizer = private(model)
    step = make_graphed_step(loss_of(model), optimizer)
    for number, (x, y) in enumerate(batches()):
        if number > CHANGED:
            optimizer.engine.group_rows(torch.arange(len(x)) // 2)
        step(x, y)
        assert len(optimizer.engine.norms) == (2 if number > CHANGED else 4)


def test_rows_that_the_loss_groups_are_refused_in_a_graph(host_graphs):
    model = network()
    optimizer = private(model)

    def loss(x, y):
        found = F.cross_entropy(model(x), y)
        optimizer.engine.group_rows(torch.arange(len(x)) // 2)
        return found

    step = make_graphed_step(loss, optimizer)
    with pytest.raises(UserError, match="group_rows"):
        for x, y in batches():
            step(x, y)


def test_a_table_that_a_graph_reads_outlives_the_cache_that_made_it():
    @device_cache(1)
    def table(size):
        return torch.arange(size)

    first, capture = table(3), OwnCapture(torch.device("cpu"))
    with capturing(capture):
        assert table(3) is first
    table(4)  # drops it from the cache
    assert table(3) is not first
    assert capture.kept == [first]
