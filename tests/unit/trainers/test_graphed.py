"""Trainers whose steps are CUDA graphs: they train as eager ones do, or say why not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpscope
from dpscope.errors import UserError
from dpscope.exactness import check as exactness
from dpscope.runner.spec import RunSpec
from dpscope.trainers import modes
from dpscope.trainers.base import StandardTrainer
from dpscope.trainers.flash import DPFlashClippingTrainer
from dpscope.trainers.opacus import DPSGDTrainer
from dpscope.vocabulary.settings import TrainerSettings
from dpscope.workloads.workload import build_workload
from tests.unit.flash.graphed.host_graphs import host_graphs

__all__ = ["host_graphs"]
STEPS = 8


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def batches(count, size=4):
    torch.manual_seed(1)
    return [(torch.randn(size, 6), torch.randint(3, (size,))) for _ in range(count)]


def trained(trainer_class, *, accumulate=1, sizes=(4,), steps=STEPS, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    trainer = trainer_class(model, loss, TrainerSettings(batch_size=4, accumulate=accumulate, **settings))
    losses = [trainer.train_step(*batches(accumulate, sizes[n % len(sizes)])) for n in range(steps)]
    return trainer, torch.stack(losses) if losses else None


@pytest.fixture
def ordinary_graphs(monkeypatch):
    """Ordinary steps captured on the CPU: a capture undoes what it ran, a replay runs it again."""
    captured = []

    def record(step, trainer=None):
        captured.append(step)
        (model,) = models
        before = [parameter.detach().clone() for parameter in model.parameters()]
        result = step()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
        return lambda: result.copy_(step()), result

    models = []
    original = StandardTrainer.prepare_model
    monkeypatch.setattr(
        StandardTrainer,
        "prepare_model",
        lambda self, model: (models.clear(), models.append(model), original(self, model))[2],
    )
    monkeypatch.setattr(StandardTrainer, "optimizer_options", lambda self, optimizer: {})  # capturable is of CUDA
    monkeypatch.setattr(modes, "record", record)
    return captured


@pytest.mark.parametrize("accumulate", [1, 3])
def test_ordinary_graphs_train_as_ordinary_steps(ordinary_graphs, accumulate):
    # Without state: what a capture does to an optimizer's state is not undone here.
    eager, losses = trained(StandardTrainer, accumulate=accumulate, optimizer="sgd", learning_rate=0.1)
    captured, found = trained(
        StandardTrainer, accumulate=accumulate, optimizer="sgd", learning_rate=0.1, cuda_graph=True
    )
    assert len(ordinary_graphs) == 1
    torch.testing.assert_close(found, losses)
    for a, b in zip(eager.model.parameters(), captured.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("accumulate", "sizes"), [(1, (4,)), (1, (4, 3)), (3, (4,))])
def test_private_graphs_train_as_private_steps_and_every_step_is_a_replay(host_graphs, optimizer, accumulate, sizes):
    settings = {"accumulate": accumulate, "sizes": sizes, "optimizer": optimizer, "learning_rate": 0.1}
    eager, losses = trained(DPFlashClippingTrainer, **settings)
    captured, found = trained(DPFlashClippingTrainer, cuda_graph=True, **settings)
    assert captured._take._step.replays == STEPS * accumulate
    torch.testing.assert_close(found, losses)
    for a, b in zip(eager.model.parameters(), captured.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_batch_of_one_sample_many_times_is_no_graph_and_says_so(host_graphs):
    trainer, _ = trained(DPFlashClippingTrainer, cuda_graph=True, steps=0)
    x, y = batches(1)[0]
    with pytest.raises(UserError, match="all samples of its batch are the same"):
        trainer.train_step((x[:1].expand(6, -1).contiguous(), y[:1].expand(6).contiguous()))


def test_other_methods_say_that_they_cannot():
    with pytest.raises(UserError, match="without --cuda-graph"):
        trained(DPSGDTrainer, cuda_graph=True)

    class Own(StandardTrainer):
        """A trainer of a user's, which may draw noise."""

    with pytest.raises(UserError, match="Own does not say that its step can be a CUDA graph"):
        trained(Own, cuda_graph=True)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"device": "cpu"}, "needs a GPU"),
        ({"device": "cuda", "gpus": 2}, "of one process"),
        ({"device": "cuda", "compile": "reduce-overhead"}, "makes CUDA graphs itself"),
        ({"device": "cuda", "instrument": "ncu"}, "single launches"),
    ],
)
def test_a_row_that_cannot_be_a_graph_is_refused_before_it_runs(settings, reason):
    with pytest.raises(UserError, match=reason):
        RunSpec(workload=dpscope.make_config("tiny"), method="flash", batch_size=4, cuda_graph=True, **settings)


def test_a_check_of_graphs_holds_each_replay_against_the_reference(host_graphs, monkeypatch):
    workload = build_workload(dpscope.make_config("tiny"), batch_size=4, seq_len=8)
    with pytest.raises(UserError, match="needs a GPU"):
        dpscope.check(workload, ["flash"], cuda_graph=True)
    monkeypatch.setattr(exactness, "has_graphs", lambda device: True)
    found = dpscope.check(workload, ["flash", "flat"], cuda_graph=True, neighbours=False)
    assert [(each.method, each.verdict) for each in found.methods] == [("flash", "exact"), ("flat", "skipped")]
    assert "without --cuda-graph" in found.methods[1].reason
    assert host_graphs.captures == 4
