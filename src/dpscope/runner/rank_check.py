"""Check that a run on several ranks equals a run in one process.

All train the same model with the same noise; in some steps all samples are on one rank.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpscope.batches import cast_batch
from dpscope.endings import outcome_of_exception
from dpscope.errors import RankEnded
from dpscope.instruments.timing import no_progress
from dpscope.runner.ranks import run_ranks
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import build, join_world
from dpscope.trainers.base import load_trainer
from dpscope.vocabulary.methods import resolve_method
from dpscope.vocabulary.statuses import SKIPPED
from dpscope.workloads.workload import silence

CHECKED_STEPS = 5
# Number format -> torch's, and how far a parameter may be from where one process puts it, of how far it moved: sums
# over the samples in another order, over a few steps.
RANK_TOLERANCES = {"fp32": (torch.float32, 1e-4), "fp64": (torch.float64, 1e-10)}

NamedWeights = dict[str, Tensor]


@dataclass(frozen=True)
class RankCheck:
    """Largest distance of the parameters from those of one process, relative to how far they moved."""

    spec: RunSpec
    dtype: str
    tolerance: float
    difference: float = math.inf
    parameter: str = ""  # where that is
    reason: str | None = None  # why it did not run

    @property
    def ran(self) -> bool:
        return self.reason is None

    @property
    def ok(self) -> bool:
        return self.ran and self.difference <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        figures = {"difference": self.difference, "parameter": self.parameter} if self.ran else {"reason": self.reason}
        return {"method": self.spec.method, "ok": self.ok, "dtype": self.dtype, "tolerance": self.tolerance, **figures}

    def __str__(self) -> str:
        where = f"{self.spec.method}, {self.dtype}: {self.spec.workload.name} on {self.spec.gpus} ranks"
        where += f" ({self.spec.parallel})"
        if self.reason is not None:
            return f"{where}: did not run: {self.reason}"
        found = f"relative difference {self.difference:.1e} at {self.parameter}, tolerance {self.tolerance:g}"
        verdict = "the parameters of one process" if self.ok else "NOT the parameters of one process"
        return f"{where}: {verdict} after {CHECKED_STEPS} steps, noise, uneven and empty shares included ({found})."


def check_ranks(spec: RunSpec, dtype: str = "fp32", tolerance: float | None = None) -> RankCheck:
    """Train on the spec's ranks and in this process, and compare."""
    spec = replace(spec, optimizer="sgd", learning_rate=0.1)
    result = RankCheck(spec, dtype, tolerance or RANK_TOLERANCES[dtype][1])
    alone = replace(spec, batch_size=spec.logical_batch_size, gpus=1)
    try:
        before, expected = train(alone, dtype, steps=0), train(alone, dtype)
    except Exception as error:
        status, reason = outcome_of_exception(error)
        if status != SKIPPED:
            raise
        return replace(result, reason=reason)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / dtype
        try:
            run_ranks(spec, no_progress, file, module=__name__)
        except RankEnded as error:
            return replace(result, reason=str(error))
        found: NamedWeights = torch.load(file, weights_only=True)
    return compare(result, before, expected, found)


def measure_rank(spec: RunSpec, file: Path) -> None:
    """Train as one of the spec's ranks. The first writes the parameters to the file, which is named by the dtype."""
    found = train(spec, file.name)
    if os.environ["RANK"] == "0":
        torch.save(found, file)


def compare(result: RankCheck, before: NamedWeights, expected: NamedWeights, found: NamedWeights) -> RankCheck:
    worst = (0.0, next(iter(expected)))
    for name, value in expected.items():
        moved = max(float((value - before[name]).abs().max()), torch.finfo(value.dtype).tiny)
        worst = max(worst, (float((found[name] - value).abs().max()) / moved, name))
    return replace(result, difference=worst[0], parameter=worst[1])


def train(spec: RunSpec, dtype: str, steps: int = CHECKED_STEPS) -> NamedWeights:
    """Train some steps as one of the spec's ranks and return every parameter, whole."""
    rank = join_world(spec)
    workload, model = build(spec, spec.logical_batch_size)
    number_format, _ = RANK_TOLERANCES[dtype]
    silence(model.to(number_format))  # dropout draws other numbers on every rank
    trainer = load_trainer(resolve_method(spec.method))(model, workload.loss, spec.settings)
    for step in range(steps):
        batch = cast_batch(workload.batch(spec.seed + step, torch.device(spec.device)), number_format)
        rows = share_of_step(step, spec.logical_batch_size, rank, spec.gpus)
        trainer.train_step(pytree.tree_map(lambda leaf, rows=rows: _rows(leaf, rows, spec.logical_batch_size), batch))
    return {name: _whole(parameter) for name, parameter in model.named_parameters()}


def share_of_step(step: int, samples: int, rank: int, ranks: int) -> list[int]:
    """Return this rank's samples of a step: distributed in even steps, all on one rank in odd steps."""
    if step % 2 == 0:
        return list(range(samples))[rank::ranks]
    return list(range(samples)) if rank == step % ranks else []


def _rows(leaf: Any, rows: Sequence[int], samples: int) -> Any:
    has_samples = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == samples
    return leaf[torch.tensor(rows, dtype=torch.long, device=leaf.device)] if has_samples else leaf


def _whole(parameter: Any) -> Tensor:
    whole: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().cpu().clone()
