"""Opacus's methods over several processes: as in one, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from dpscope.errors import UserError
from dpscope.flash.torch_side.torch_version import is_at_least
from dpscope.trainers.base import TrainerBase, load_trainer
from dpscope.trainers.opacus import OLDEST_SHARDED_ON_CPU
from dpscope.vocabulary.methods import resolve_method
from dpscope.vocabulary.settings import TrainerSettings
from tests.torch_here import takes_shards
from tests.unit.flash.ranks.world import Model, in_world, make_data, rank_and_world, whole_parameters

RUNS = [("flat", "ddp"), ("ghost", "ddp"), *([("ghost", "fsdp")] if is_at_least(OLDEST_SHARDED_ON_CPU) else [])]
SAMPLES = 8


def make_trainer(method: str, model: nn.Module | None = None, **settings: Any) -> TrainerBase:
    torch.manual_seed(0)
    trainer = load_trainer(resolve_method(method))
    loss = nn.CrossEntropyLoss(reduction="none")
    values = {"batch_size": SAMPLES, "optimizer": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.3, **settings}
    return trainer(model or Model(), lambda m, batch: loss(m(batch[0]), batch[1]), TrainerSettings(**values))


def trained(method: str, **settings: Any) -> dict[str, Tensor]:
    """After three steps, with this rank's share of each batch and the noise of one seed."""
    rank, world = rank_and_world()
    trainer = make_trainer(method, batch_size=SAMPLES // world, **settings)
    for first in (0, SAMPLES, 2 * SAMPLES):
        rows = range(first + rank, first + SAMPLES, world)
        trainer.train_step(tuple(tensor[list(rows)] for tensor in make_data().tensors))
    return whole_parameters(trainer.plain_model)


def every_run(**settings: Any) -> dict[tuple[str, str], dict[str, Tensor]]:
    return {(method, way): trained(method, parallel=way, **settings) for method, way in RUNS}


@pytest.mark.slow
def test_opacus_on_two_ranks_gives_its_parameters_of_one_process_noise_included(clean_copy: Any) -> None:
    expected = every_run()
    for found in clean_copy(in_world, 2, every_run_on_two_ranks):
        for run, parameters in found.items():
            for name, value in parameters.items():
                torch.testing.assert_close(value, expected[run][name], atol=1e-6, rtol=0)


def every_run_on_two_ranks() -> dict[tuple[str, str], dict[str, Tensor]]:
    return every_run(gpus=2)


@pytest.fixture
def four_processes() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight


class OwnParameter(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))


@takes_shards
@pytest.mark.usefixtures("four_processes")
@pytest.mark.parametrize(
    ("method", "way", "model", "words"),
    [
        ("flat", "fsdp", Model, "no flat clipping of a sharded model"),
        ("flat", "hsdp", Model, "over replicas of shards"),
        ("ghost", "hsdp", Model, "over replicas of shards"),
        ("ghost", "fsdp", Model, r"head.weight of shape \(3, 6\) in 4 shards"),
        ("ghost", "fsdp", Tied, r"tied weights of a sharded model \(blocks.0.up.weight, blocks.1.up.weight\)"),
        ("ghost", "fsdp", OwnParameter, r"the model itself \(OwnParameter\) owns parameters"),
    ],
)
def test_what_opacus_cannot_train_over_processes_is_refused_with_what_to_compare_instead(
    method: str, way: str, model: type[nn.Module], words: str
) -> None:
    with pytest.raises(UserError, match=words) as refusal:
        make_trainer(method, model(), parallel=way, gpus=4)
    assert "--methods standard" in str(refusal.value)


@takes_shards
@pytest.mark.usefixtures("four_processes")
def test_opacus_is_not_sharded_on_the_cpu_of_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(UserError, match="leave out --device cpu"):
        make_trainer("ghost", parallel="fsdp", gpus=4)


@pytest.mark.usefixtures("four_processes")
@pytest.mark.parametrize("version", ["2.7.1", "2.10.0+cpu"])
def test_ghost_clipping_is_not_sharded_where_gloo_adds_up_what_it_should_average(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    model = Model()
    model.head = nn.Linear(6, 4)  # a row for each rank
    with pytest.raises(UserError, match=r"takes torch 2\.11 or newer, .* compare ghost with --parallel ddp"):
        make_trainer("ghost", model, parallel="fsdp", gpus=4)


@pytest.mark.usefixtures("four_processes")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("method", "way"), RUNS)
def test_one_of_four_simulated_ranks_takes_steps(method: str, way: str, accumulate: int) -> None:
    model = Model()
    model.head = nn.Linear(6, 4)  # a row for each rank
    trainer = make_trainer(method, model, parallel=way, simulate_world=4, accumulate=accumulate)
    batch = tuple(tensor[:SAMPLES] for tensor in make_data().tensors)
    for _ in range(2):
        trainer.train_step(*[batch] * accumulate)
