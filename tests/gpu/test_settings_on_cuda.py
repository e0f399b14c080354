"""Checkpointed blocks, logical batches and weights in bf16 on a GPU, where the update is fused."""

from __future__ import annotations

import math

import pytest
import torch

from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import assemble
from dpscope.workloads.configs import make_config, parse_lora, with_lora
from dpscope.workloads.workload import build_model, build_workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL = make_config("tiny", num_layers=2, hidden_dim=64, num_heads=2, vocab_size=200, max_seq_len=64)
LEARNING_RATE = 1e6


def sums_of_a_step(*, batch_seed=None, **changes):
    """What a step without noise sums up, by parameter; `batch_seed`: on the batch of another seed than the model's."""
    values = {"batch_size": 4, "seq_len": 64, "noise_multiplier": 0.0, "optimizer": "sgd", "max_grad_norm": 0.05}
    values |= {"workload": SMALL, "method": "flash", "device": "cuda", "learning_rate": LEARNING_RATE}
    spec = RunSpec(**{**values, **changes})
    trainer, batches = assemble(spec)
    if batch_seed is not None:
        batches = [build_workload(SMALL, batch_size=4, seq_len=64).batch(batch_seed, torch.device("cuda"))]
    before = {name: p.detach().clone() for name, p in trainer.plain_model.named_parameters()}
    trainer.train_step(*batches)
    return {
        name: (before[name] - p.detach()).double() * (spec.logical_batch_size / LEARNING_RATE)
        for name, p in trainer.plain_model.named_parameters()
    }


def norm_of(sums):
    return math.sqrt(sum(float(sum_.square().sum()) for sum_ in sums.values()))


def test_checkpointed_blocks_change_nothing_of_the_sum():
    plain, checkpointed = sums_of_a_step(), sums_of_a_step(checkpoint_blocks=True)
    for name, wanted in plain.items():
        assert float((checkpointed[name] - wanted).norm()) <= 1e-5 * max(float(wanted.norm()), 1e-4 * norm_of(plain))


def test_a_logical_batch_is_the_sum_of_its_batches():
    """Batches are drawn from the seed and those after it."""
    first, second, both = sums_of_a_step(), sums_of_a_step(batch_seed=1), sums_of_a_step(accumulate=2)
    for name, total in both.items():
        wanted = first[name] + second[name]
        assert float((total - wanted).norm()) <= 1e-5 * max(float(wanted.norm()), 1e-4 * norm_of(both)), name


@pytest.mark.parametrize("length", [1, 16, 64])
def test_one_sample_moves_weights_in_bf16_by_no_more_than_the_clip_norm(length):
    """The weights are rounded after the step, each by up to 1/512: next to nothing of a norm over all of them."""
    for seed in range(4):
        sums = sums_of_a_step(dtype="bf16", param_dtype="bf16", batch_size=1, seq_len=length, seed=seed)
        assert norm_of(sums) <= 0.05 * (1 + 2e-3)


def test_a_model_with_adapters_is_built_in_bf16_and_nothing_larger():
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    config = make_config("hf:llama-8b", num_layers=2, vocab_size=32000)
    config = with_lora(config, parse_lora("r=16,target=all-linear"))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        model = build_model(build_workload(config, batch_size=1, seq_len=8), "bf16")
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    assert torch.cuda.max_memory_allocated() - before <= held + largest
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
