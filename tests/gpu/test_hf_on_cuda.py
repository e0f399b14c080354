"""Models of Hugging Face on a GPU: flash is exact there too, and private steps run under autocast."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dpscope.flash.oracle import run_oracle
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import make_trainer
from dpscope.workloads.configs import make_config, parse_lora, with_lora
from dpscope.workloads.workload import build_workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytest.importorskip("transformers")

WORKLOADS = {
    "gpt2": make_config("hf:gpt2-tiny"),
    "llama": make_config("hf:llama-tiny"),
    "bert": make_config("hf:bert-tiny"),
    "vit": make_config("hf:vit-tiny"),
    "resnet": make_config("resnet-tiny"),
    "llama with lora": with_lora(make_config("hf:llama-tiny"), parse_lora("r=4,target=q_proj,v_proj")),
}


def spec_of(name, **changes):
    workload = WORKLOADS[name]
    length = None if workload.resolve_seq_len(None) is None else 64
    values = {"method": "flash", "batch_size": 4, "seq_len": length, "device": "cuda", "max_grad_norm": 0.05}
    return RunSpec(workload=workload, **{**values, **changes})


@pytest.mark.parametrize("name", WORKLOADS)
def test_flash_is_exact_on_the_gpu(name):
    if "lora" in name:
        pytest.importorskip("peft")
    spec = spec_of(name, noise_multiplier=0.0, optimizer="sgd", learning_rate=1e6)
    workload = build_workload(spec.workload, batch_size=4, seq_len=spec.seq_len)
    device = torch.device("cuda")
    torch.manual_seed(spec.seed)
    with device:
        model = workload.model()
    batch = workload.batch(spec.seed, device)
    truth = run_oracle(
        model, batch, lambda m, b: workload.loss(m, b).mean(), max_grad_norm=spec.max_grad_norm, dtype=torch.float64
    )
    trainer, batch = make_trainer(spec)
    before = {key: p.detach().clone() for key, p in trainer.model.named_parameters()}
    trainer.train_step(batch)
    total = math.sqrt(sum(float(wanted.square().sum()) for wanted in truth.clipped_sums.values()))
    for key, parameter in trainer.model.named_parameters():
        if parameter.requires_grad:
            applied = (before[key] - parameter.detach()).double() * (4 / 1e6)
            wanted = truth.clipped_sums[key]
            # Convolutions pick other algorithms for other batch sizes: float32 sums in another order.
            assert float((applied - wanted).norm()) <= 5e-5 * max(float(wanted.norm()), 1e-4 * total), key


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("method", ["standard", "flat", "flash"])
def test_a_step_in_bf16_moves_what_is_trained(name, method):
    if "lora" in name:
        pytest.importorskip("peft")
    trainer, batch = make_trainer(replace(spec_of(name), method=method, dtype="bf16"))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    assert math.isfinite(trainer.train_step(batch).item())
    for old, new in zip(before, trainer.model.parameters(), strict=True):
        assert torch.equal(old, new) != new.requires_grad
