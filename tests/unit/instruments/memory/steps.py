"""Small steps to look at: trainers of every method, fresh each time."""

from __future__ import annotations

from dpscope.instruments.memory import Tracker, attribute
from dpscope.runner.measurements.memory import _holdings
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import make_trainer
from dpscope.workloads.configs import make_config

METHODS = ("standard", "flat", "ghost", "flash")
TRANSFORMER = {"num_layers": 2, "hidden_dim": 32, "num_heads": 2, "vocab_size": 101, "max_seq_len": 64}
WORKLOADS = {
    "transformer": {"workload": make_config("tiny", **TRANSFORMER), "batch_size": 3, "seq_len": 24},
    "cnn": {"workload": make_config("cnn", image_size=16, norm="group"), "batch_size": 3},
}


def trainer_of(method, kind="transformer", **changes):
    spec = RunSpec(**{"method": method, "device": "cpu", **WORKLOADS[kind], **changes})
    return make_trainer(spec)


def tracked_step(trainer, batch, rules=()):
    """The memory use of one step."""
    with Tracker("cpu", trainer.plain_model, lambda: _holdings(trainer, batch)).tracking() as record:
        trainer.train_step(batch)
    return attribute(record, [*rules, *trainer.memory_rules])
