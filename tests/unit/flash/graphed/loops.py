"""A small network trained by the loop and by graphs, on the same data with the same noise."""

import torch
import torch.nn.functional as F
from torch import nn

from dpscope.flash import DPFlashOptimizer, FlashEngine, make_graphed_step

STEPS = 12
CHANGED = 6  # the step before which things change in tests: steps 5 and 6 are replays
WIDTH, CLASSES = 6, 3


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES))


def private(model: nn.Module, optimizer=torch.optim.AdamW, *, clipping="flat", **options):
    engine = FlashEngine(model, max_grad_norm=0.5, clipping=clipping)
    noise = torch.Generator().manual_seed(5)
    return DPFlashOptimizer(
        optimizer(model.parameters(), lr=0.05),
        engine=engine,
        noise_multiplier=1.0,
        max_grad_norm=engine.max_grad_norm,
        expected_batch_size=4,
        generator=noise,
        **options,
    )


def batches(count: int = STEPS, sizes=(4,)):
    torch.manual_seed(1)
    for number in range(count):
        size = sizes[number % len(sizes)]
        yield torch.randn(size, WIDTH), torch.randint(CLASSES, (size,))


def loss_of(model):
    return lambda x, y: F.cross_entropy(model(x), y)


def trained_by_loop(model, optimizer, data, between=lambda number, optimizer: None):
    losses = []
    for number, (x, y) in enumerate(data):
        between(number, optimizer)
        loss = loss_of(model)(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def trained_by_graph(model, optimizer, data, between=lambda number, optimizer: None):
    step, losses = make_graphed_step(loss_of(model), optimizer), []
    for number, (x, y) in enumerate(data):
        between(number, optimizer)
        losses.append(step(x, y))
    return step, losses


def assert_same(first: nn.Module, second: nn.Module) -> None:
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def assert_trains_alike(host_graphs, make, data, between=lambda number, optimizer: None, *, dropout=0.0):
    by_loop, by_graph = network(dropout), network(dropout)
    torch.manual_seed(3)
    losses = trained_by_loop(by_loop, make(by_loop), list(data()), between)
    torch.manual_seed(3)
    step, found = trained_by_graph(by_graph, make(by_graph), list(data()), between)
    assert_same(by_loop, by_graph)
    torch.testing.assert_close(torch.stack(found), torch.stack(losses))
    assert step.replays
    assert host_graphs.captures
    return step
