"""The estimate on CUDA: backward passes run in autograd's own threads, and flash clipping in Triton kernels."""

from __future__ import annotations

import pytest
import torch

from dpscope.instruments.estimate import estimate_traffic
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import make_trainer
from dpscope.vocabulary import phases
from dpscope.vocabulary.phases import BACKWARD
from dpscope.workloads.configs import make_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def estimate(method):
    spec = RunSpec(
        workload=make_config("small"), method=method, batch_size=4, seq_len=256, dtype="bf16", device="cuda", warmup=0
    )
    trainer, batch = make_trainer(spec)
    for _ in range(2):
        trainer.train_step(batch)
    return estimate_traffic(lambda: trainer.train_step(batch), device="cuda"), trainer


@pytest.mark.parametrize("method", ["standard", "flat", "ghost", "flash"])
def test_backward_passes_and_every_byte_of_the_optimizer_are_seen(method):
    """AdamW in one pass: parameter, gradient and two moments are read, parameter and two moments written."""
    seen, trainer = estimate(method)
    rows = seen["kernels"]["rows"]
    products = [row for row in rows if row["family"] == phases.GEMM and row["phase"] == BACKWARD]
    assert sum(row["flops"] for row in products) > 0
    state = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    update = [row for row in rows if row["name"] in ("aten::_fused_adamw_", "_adam_kernel")]
    assert sum(row["dram_read_bytes"] for row in update) == pytest.approx(4 * state, rel=0.01)
    assert sum(row["dram_write_bytes"] for row in update) == pytest.approx(3 * state, rel=0.01)


def test_the_kernels_of_flash_clipping_are_seen():
    seen, _ = estimate("flash")
    assert {"_gram_kernel", "_scaled_sum_kernel", "_adam_kernel"} <= {row["name"] for row in seen["kernels"]["rows"]}


def test_flash_does_the_products_of_ordinary_training_and_the_norms():
    """What flash computes beyond standard is what its norm kernels announce."""
    (ordinary, _), (flash, _) = estimate("standard"), estimate("flash")
    norms = sum(row["flops"] for row in flash["kernels"]["rows"] if row["name"].startswith("_gram"))
    assert flash["flops"]["total"] - norms == pytest.approx(ordinary["flops"]["total"], rel=0.02)
    torch.cuda.empty_cache()
