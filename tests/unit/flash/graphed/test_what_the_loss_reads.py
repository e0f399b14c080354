"""What the loss reads besides the model: variables, attributes, modules, its arguments. A graph notices or refuses."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpscope.errors import UserError
from dpscope.flash import make_graphed_step
from tests.unit.flash.graphed.loops import (
    CHANGED,
    CLASSES,
    WIDTH,
    assert_same,
    batches,
    loss_of,
    network,
    private,
    trained_by_graph,
    trained_by_loop,
)


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
    weight, criterion = 1.0, nn.CrossEntropyLoss(weight=torch.ones(CLASSES))

    def closure(x, y):
        return weight * criterion(model(x), y)

    def set_to(value):
        nonlocal weight
        if kind == "a variable":
            weight = value
        elif kind == "a number of a module":
            criterion.label_smoothing = 1 - value
        elif abs(float(criterion.weight[0]) - value) > 0.1:
            criterion.weight = torch.tensor([value, 1.0, 1.0])

    return closure, set_to


@pytest.mark.parametrize("kind", ["an attribute", "a variable", "a number of a module", "a tensor of a module"])
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
