"""Flash clipping on random models: exact, or refused where a block hides its samples; never silently wrong.

`DPSCOPE_FUZZ_MODELS=2000 DPSCOPE_FUZZ_SEED=10000 python -m pytest tests/fuzz` tries others. On a machine with CUDA the
same models run there, too.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dpscope.batches import cast_batch
from dpscope.errors import UserError
from dpscope.flash import FlashEngine, pad_batch, real_rows, run_oracle
from tests.fuzz import FIRST_SEED, MODELS
from tests.fuzz.blocks import without_checkpoints
from tests.fuzz.closeness import assert_close
from tests.fuzz.random_models import Case, losses_of, make_case
from tests.unit.flash.agreement import one_loss, private_step, reference

SEEDS = range(FIRST_SEED, FIRST_SEED + MODELS)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def assert_exact_or_refused(case: Case) -> str:
    """Every batch in turn on one engine. What ordinary training does without an error, flash does, or refuses."""
    plain = copy.deepcopy(case.model)
    for batch in case.batches:
        losses_of(plain, batch).sum().backward()
    with without_checkpoints():
        _, c = reference(case.model, case.batches[0], losses_of, case.clipping)
    try:
        engine = FlashEngine(
            case.model,
            max_grad_norm=c,
            loss_reduction=case.loss_reduction,
            path=case.path,
            memory_budget=case.memory_budget,
        )
    except UserError as refusal:
        assert case.may_be_refused, f"{case}\nrefused: {refusal}"
        return "refused"
    with engine:
        for batch in case.batches:
            engine.clear_gradients()
            try:
                private_step(engine, padded(case, batch), losses_of)
            except UserError as refusal:
                assert case.may_be_refused or output_is_rounding(case, batch), f"{case}\nrefused: {refusal}"
                return "refused"
            with without_checkpoints():
                truth, noisy = (
                    run_oracle(case.model, batch, one_loss(losses_of), max_grad_norm=c, dtype=dtype)
                    for dtype in (torch.float64, case.dtype)
                )
            try:
                assert_close(case.model, case.dtype, engine, truth, noisy)
            except AssertionError as wrong:
                raise AssertionError(f"{case}\nsilently wrong: {wrong}") from None
    return "exact"


def padded(case: Case, batch: Any) -> Any:
    return pad_batch(batch, real_rows(batch) + case.padding) if case.padding else batch


def output_is_rounding(case: Case, batch: Any) -> bool:
    """A sum right after a normalisation is zero but for rounding, and rounding moves with the other samples."""
    with torch.no_grad(), without_checkpoints():
        losses = losses_of(copy.deepcopy(case.model).double(), cast_batch(batch, torch.float64))
    return float(losses.abs().max()) < 1e-6


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_is_clipped_exactly_or_refused(seed):
    assert_exact_or_refused(make_case(seed))


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_on_a_gpu_is_clipped_exactly_or_refused(seed):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    assert_exact_or_refused(make_case(seed, "cuda"))


def test_most_random_models_are_trained_and_not_refused():
    """A fuzz that is mostly refused shows nothing."""
    refusable = sum(make_case(seed).may_be_refused for seed in range(100))
    assert refusable < 40
