"""What one step of a method does to a model, and what micro-batches of one would have done."""

from __future__ import annotations

import torch

from dpscope.flash.oracle import run_oracle
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import assemble
from dpscope.workloads.configs import make_config
from dpscope.workloads.workload import build_workload

# The sum is read off what plain SGD did to the parameters. With a step this large their own size is lost in the
# rounding, and not the other way round.
LEARNING_RATE = 2.0**19
TOLERANCE = 1e-5  # hundred roundings of float32: sums of some thousand terms in another order
VANISHING = 1e-6  # of the whole: the gradient of a key's bias is zero, and what one sees of it is rounding

SMALL = {
    "transformer": make_config("tiny", num_layers=2, hidden_dim=16, num_heads=2, vocab_size=40, max_seq_len=16),
    "resnet": make_config("resnet-tiny"),
    "gpt2": make_config("hf:gpt2-tiny", hidden_dim=16, num_heads=2, vocab_size=40),
    "vit": make_config("hf:vit-tiny", hidden_dim=16, num_heads=2),
}


def spec_of(name: str, method: str, **changes) -> RunSpec:
    values = {"batch_size": 2, "optimizer": "sgd", "learning_rate": LEARNING_RATE, "noise_multiplier": 0.0, "seed": 3}
    length = 8 if name in ("transformer", "gpt2") else None
    return RunSpec(workload=SMALL[name], method=method, seq_len=length, **{**values, **changes})


def applied_sums(trainer, batches, samples: int):
    """What one step summed up, by parameter; the parameters are then as they were."""
    named = dict(trainer.plain_model.named_parameters())
    before = {name: p.detach().clone() for name, p in named.items()}
    trainer.train_step(*batches)
    moves = {name: (before[name] - p.detach()).double() * (samples / LEARNING_RATE) for name, p in named.items()}
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(before[name])
    return moves


def sums_of_a_step(spec: RunSpec):
    trainer, batches = assemble(spec)
    return applied_sums(trainer, batches, spec.logical_batch_size)


def oracle_sums(spec: RunSpec):
    """Σ_b c_b v_b over all batches of a step of a model without checkpoints, one sample at a time."""
    workload = build_workload(spec.workload, batch_size=spec.batch_size, seq_len=spec.seq_len)
    torch.manual_seed(spec.seed)
    model = workload.model()
    clip = 1e9 if spec.method == "standard" else spec.max_grad_norm
    found = [
        run_oracle(model, workload.batch(spec.seed + k, torch.device("cpu")), mean_of(workload), max_grad_norm=clip)
        for k in range(spec.accumulate)
    ]
    return {name: sum(each.clipped_sums[name].double() for each in found) for name in found[0].clipped_sums}


def mean_of(workload):
    return lambda model, batch: workload.loss(model, batch).mean()


def assert_agree(found, wanted):
    whole = sum(float(g.square().sum()) for g in wanted.values()) ** 0.5
    assert set(found) == set(wanted)
    for name, sum_ in wanted.items():
        size = max(float(sum_.norm()), VANISHING * whole / TOLERANCE)
        assert float((found[name] - sum_).norm()) / size < TOLERANCE, name
