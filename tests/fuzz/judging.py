"""The verdict on a run: every step exact against micro-batches of one, or refused; samples that mix are refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch

from dpscope.batches import map_tensors
from dpscope.errors import UserError
from dpscope.flash import FlashEngine, OracleResult, run_oracle
from dpscope.flash.oracle import copy_of
from dpscope.flash.sample_rows import tried_call
from tests.fuzz.blocks import without_checkpoints
from tests.fuzz.changes import BETWEEN
from tests.fuzz.changing_models import Run, Step
from tests.fuzz.closeness import assert_close
from tests.unit.flash.agreement import max_grad_norm_for, one_loss

LOOKS = (2, 8, 32)  # passes at which even small batches are looked at


class Verdict(NamedTuple):
    """The end of a run.

    exact        every step was
    refused      an error, though samples do not mix
    found        an error, and they do
    told         the user's mistake, or torch's own error at it
    error        torch's own error, in a step whose samples mix
    unseen       mixing at random that no look has met; a division by the batch size that hardly shows in the output
    untrainable  ordinary training fails, too
    """

    kind: str
    detail: str = ""


class Wrong(AssertionError):
    pass


def _micro_batches(step: Step) -> list[Any]:
    edges = [sum(step.parts[:index]) for index in range(len(step.parts) + 1)]
    return [map_tensors(step.batch, lambda x, a=a, b=b: x[a:b]) for a, b in pairwise(edges)]


def judge(run: Run) -> Verdict:
    engine = None
    tried_call.RANDOM.seed(run.seed)  # which samples are looked at: so that a seed can be run again
    try:
        engine = FlashEngine(run.model, max_grad_norm=1.0, loss_reduction=run.loss_reduction, path=run.path)
        passes = 0
        for index, step in enumerate(run.steps):
            for change in step.before:
                change()
            passes += len(step.parts)
            with step.during():
                verdict = _judge_step(run, engine, step, index, passes)
            if verdict is not None:
                return verdict
        return Verdict("unseen" if run.found == "random" else "exact")
    except UserError as refusal:
        return Verdict("found" if run.found == "step" and run.steps[0].mixes else "refused", str(refusal))
    finally:
        if engine is not None:
            engine.detach()


def _judge_step(run: Run, engine: FlashEngine, step: Step, index: int, passes: int) -> Verdict | None:
    """None where the step is as it should be, and the run goes on."""

    def losses(model: Any, batch: Any) -> torch.Tensor:
        return model(*batch, **step.call)

    parts = _micro_batches(step)
    failure = "" if step.mixes else _failure_of_ordinary_training(run, engine, parts, losses)
    if failure:
        return Verdict("untrainable", f"step {index}: {failure}")
    kept = parts[1:] if BETWEEN[step.between][1] and len(parts) > 1 else parts
    truth = noisy = None
    if not step.mixes:
        truth, noisy, engine.max_grad_norm = _truth(run, engine, kept, losses)
    failed = _train(run, engine, step, parts, losses)
    if failed is not None:
        untrainable = failed.kind == "error" and _failure_of_ordinary_training(run, engine, parts, losses)
        return Verdict("untrainable" if untrainable else failed.kind, f"step {index}: {failed.detail}")
    if step.mixes:
        due = run.found == "step" or (run.found == "look" and passes in LOOKS)
        if due and _shows(engine, step.batch, losses):
            raise Wrong(f"{run}\nstep {index}: samples mix, and the step was taken")
        return None
    if truth is None or noisy is None:
        raise Wrong("no truth")
    try:
        assert_close(run.model, run.dtype, engine, truth, noisy, norms=len(parts) == 1)
    except AssertionError as wrong:
        if run.found == "count":  # it does not show in every row of the output (docs/guarantees.md)
            return Verdict("unseen", f"step {index}: {wrong}")
        raise Wrong(f"{run}\nstep {index}: silently wrong: {wrong}") from None
    with torch.no_grad():
        for parameter in run.model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.05 * parameter.grad / (1e-6 + parameter.grad.norm()))
    return None


def _train(run: Run, engine: FlashEngine, step: Step, parts: list[Any], losses: Any) -> Verdict | None:
    engine.zero_grad()
    try:
        for position, part in enumerate(parts):
            if position:
                try:
                    BETWEEN[step.between][0](run.model)
                except RuntimeError as error:  # torch's own, of gradients that are not there
                    return Verdict("told", f"{step.between}: {error}")
            found = losses(run.model, part)
            (found.mean() if run.loss_reduction == "mean" else found.sum()).backward()
        engine.finish()
    except UserError as refusal:
        kind = "found" if step.mixes or run.found == "count" else "told" if run.mistake else "refused"
        return Verdict(kind, str(refusal))
    except Exception as error:
        if step.mixes:
            return Verdict("error", f"{type(error).__name__}: {error}")
        raise Wrong(f"{run}\n{type(error).__name__}: {error}") from error
    return None


@torch.no_grad()
def _shows(engine: FlashEngine, batch: Any, losses: Any) -> bool:
    """Return whether samples together give another output than one by one: a mean over a normalisation is constant."""
    with engine.without_taps():
        model = copy_of(engine.model)
    together = losses(model, batch)
    alone = torch.cat([losses(model, map_tensors(batch, lambda x, b=b: x[b : b + 1])) for b in range(len(together))])
    return not torch.allclose(together, alone, rtol=1e-4, atol=1e-6)


def _failure_of_ordinary_training(run: Run, engine: FlashEngine, parts: list[Any], losses: Any) -> str:
    """Return torch's error where ordinary training cannot take the step; "" where it can."""
    with engine.without_taps():
        plain = copy_of(run.model)
    try:
        for part in parts:
            losses(plain, part).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _truth(run: Run, engine: FlashEngine, parts: list[Any], losses: Any) -> tuple[OracleResult, OracleResult, float]:
    """The oracle's sums, in float64 and in the model's dtype, of all micro-batches together, and C."""
    batch = tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
    with engine.without_taps(), without_checkpoints():
        first = run_oracle(run.model, batch, one_loss(losses), max_grad_norm=1.0, dtype=torch.float64)
        c = max_grad_norm_for(run.clipping, first.norms)
        truth, noisy = (
            run_oracle(run.model, batch, one_loss(losses), max_grad_norm=c, dtype=dtype)
            for dtype in (torch.float64, run.dtype)
        )
    return truth, noisy, c
