"""Adapters of PEFT: what should move moves, exactly, and nothing else does."""

from __future__ import annotations

import copy

import pytest
import torch

from dpscope.transformers.steps import sample_losses
from tests.unit.transformers.small_training import Counting, assert_same, collate, private_trainer, small_llama, weights

peft = pytest.importorskip("peft")

TASK = {"task_type": "CAUSAL_LM"}
LINEARS = ["q_proj", "v_proj", "down_proj"]


def lora(**changed):
    return peft.LoraConfig(**{"r": 2, "target_modules": LINEARS, "init_lora_weights": False, **TASK, **changed})


KINDS = {
    "lora": lora(),
    "rslora": lora(use_rslora=True),
    "dora": lora(use_dora=True),
    "lora with bias": lora(bias="lora_only"),
    "lora and modules to save": lora(modules_to_save=["lm_head"]),
    "ia3": peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], **TASK),
    "prompt tuning": peft.PromptTuningConfig(num_virtual_tokens=3, **TASK),
    "p-tuning": peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **TASK),
    "prefix tuning": peft.PrefixTuningConfig(num_virtual_tokens=3, **TASK),
}


def adapted(config):
    torch.manual_seed(1)
    return peft.get_peft_model(small_llama(), config)


def one_by_one(model, draws, *, lr, expected, clip=1.0):
    """SGD steps on sums of clipped gradients, one sample at a time, in plain autograd."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    data = Counting()
    for draw in draws:
        totals = [torch.zeros_like(parameter) for parameter in trained]
        for index in draw:
            batch = collate([data[index]])
            labels = batch.pop("labels")
            gradients = torch.autograd.grad(sample_losses(model, model(**batch), labels).sum(), trained)
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            for total, gradient in zip(totals, gradients, strict=True):
                total.add_(gradient, alpha=min(1.0, clip / norm.item()))
        with torch.no_grad():
            for parameter, total in zip(trained, totals, strict=True):
                parameter.sub_(total, alpha=lr / expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_trained_exactly_and_nothing_else(tmp_path, kind):
    model = adapted(KINDS[kind])
    start, reference = weights(model), copy.deepcopy(model)
    settings = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_steps": 2}
    trainer = private_trainer(tmp_path, model=model, settings=settings, noise_multiplier=0.0)
    draws = record_draws(trainer)
    trainer.train()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    moved = {name for name, value in weights(model).items() if not torch.equal(value, start[name])}
    assert moved == trained
    one_by_one(reference, draws, lr=0.5, expected=trainer._optimizer.expected_batch_size)
    assert_same(weights(model), weights(reference))


def record_draws(trainer):
    draws = []
    step = trainer.training_step

    def training_step(model, inputs, *rest):
        rows = [row for batch in inputs for row in batch["input_ids"]]
        masks = [row for batch in inputs for row in batch["attention_mask"]]
        found = [tuple(ids[: mask.sum()].tolist()) for ids, mask in zip(rows, masks, strict=True)]
        known = {tuple(sample.tolist()): index for index, sample in enumerate(Counting().rows)}
        draws.append([known[each] for each in found])
        return step(model, inputs, *rest)

    trainer.training_step = training_step
    return draws


def test_of_several_adapters_the_active_one_is_trained(tmp_path):
    model = adapted(lora())
    model.add_adapter("second", lora(target_modules=["o_proj"]))
    model.set_adapter("second")
    start = weights(model)
    private_trainer(tmp_path, model=model).train()
    moved = {name for name, value in weights(model).items() if not torch.equal(value, start[name])}
    assert moved == {name for name in start if ".second." in name}


def test_merged_weights_are_saved_and_give_the_trained_model(tmp_path):
    trainer = private_trainer(tmp_path / "run", model=adapted(lora()))
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter" / "privacy.json").exists()
    batch = collate([Counting()[0], Counting()[1]])
    with torch.no_grad():
        expected = trainer.model.eval()(**batch).logits
        again = peft.PeftModel.from_pretrained(small_llama(), str(tmp_path / "adapter"))
        merged = again.merge_and_unload().eval()
        torch.testing.assert_close(merged(**batch).logits, expected, rtol=1e-4, atol=1e-5)
