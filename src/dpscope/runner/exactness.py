"""Is a method exact? One step without noise, held against micro-batches of one.

The gradient that a step applied is read off what plain SGD did to the parameters, so that any method can be put to the
test, whatever it keeps in `.grad`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpscope.flash.explanation import Explanation
from dpscope.flash.oracle import OracleResult, run_oracle
from dpscope.runner.assembly import make_trainer
from dpscope.runner.spec import RunSpec
from dpscope.workloads.workload import build_workload

TOLERANCE = 1e-5
# With a step this large the parameters' own size is lost in the rounding, and not the other way round.
LEARNING_RATE = 1e6
# A parameter whose gradient vanishes against the whole (a key's bias before a softmax) has no relative error to speak
# of: what one sees of it is rounding.
VANISHING = 1e-4


@dataclass(frozen=True)
class Exactness:
    """Relative errors of one method's clipped, averaged gradient, by parameter, and what the oracle saw."""

    method: str
    errors: dict[str, float]
    norms: Tensor  # (B,) of the oracle's per-sample gradients
    clipped: int  # samples whose norm was above the clip norm
    paths: Explanation | None

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.errors.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])

    @property
    def exact(self) -> bool:
        return not any(math.isnan(error) or error > TOLERANCE for error in self.errors.values())


def run_oracle_of(spec: RunSpec) -> OracleResult:
    """Norms, factors and clipped sums of the spec's workload, one sample at a time, in float64."""
    workload = build_workload(spec.workload, batch_size=spec.batch_size, seq_len=spec.seq_len)
    device = torch.device(spec.device)
    torch.manual_seed(spec.seed)
    with device:
        model = workload.model()
    batch = workload.batch(spec.seed, device)
    return run_oracle(
        model,
        batch,
        lambda m, b: workload.loss(m, b).mean(),
        max_grad_norm=spec.max_grad_norm,
        dtype=torch.float64,
    )


def telling_clip_norm(oracle: OracleResult) -> float:
    """What a check should clip at: half of the samples exceed it, half do not; all do where norms are about equal."""
    norms = oracle.norms.sort().values
    middle = (len(norms) - 1) // 2
    lower, upper = float(norms[middle]), float(norms[min(middle + 1, len(norms) - 1)])
    return (lower + upper) / 2 if lower < 0.999 * upper else 0.9 * lower


def check_method(spec: RunSpec, oracle: OracleResult) -> Exactness:
    """One step of the spec's method against `oracle`, which was run at the same clip norm."""
    spec = replace(spec, noise_multiplier=0.0, optimizer="sgd", learning_rate=LEARNING_RATE)
    trainer, batch = make_trainer(spec)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train_step(batch)
    names = list(oracle.clipped_sums)  # wrappers add a prefix to names; the order is the model's own
    total = math.sqrt(sum(float(sums.double().square().sum()) for sums in oracle.clipped_sums.values()))
    errors = {}
    for name, (key, parameter) in zip(names, trainer.model.named_parameters(), strict=True):
        applied = (before[key] - parameter.detach()).double() * (spec.batch_size / LEARNING_RATE)
        wanted = oracle.clipped_sums[name].double()
        size = max(float(wanted.norm()), VANISHING * total)
        errors[name] = float((applied - wanted).norm()) / size if size else float(applied.norm())
    engine = getattr(trainer, "engine", None)
    return Exactness(
        method=spec.method,
        errors=errors,
        norms=oracle.norms,
        clipped=int((oracle.factors < 1).sum()),
        paths=engine.explain() if engine is not None else None,
    )
