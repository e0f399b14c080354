"""Hugging Face models with gradient_checkpointing_enable(), blocks held and recomputed."""

import pytest
import torch
import torch.nn.functional as F

from dpscope.flash import FlashEngine
from tests.unit.flash.agreement import assert_agrees, private_step, reference

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")

SHAPE = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2}
ATTENTION = {
    **SHAPE,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "sliding_window": 4,
}


def gemma2():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**ATTENTION))


def gemma3():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**ATTENTION))


def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(**SHAPE, state_size=4, expand=2, conv_kernel=4, use_mambapy=False))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=16))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {key: value for key, value in ATTENTION.items() if key != "sliding_window"}
    return LlamaForCausalLM(LlamaConfig(**shape))


def losses(model, batch):
    logits = model(input_ids=batch["ids"], use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2).float(), batch["ids"][:, 1:], reduction="none").mean(1)


@pytest.mark.parametrize("make", [gemma2, gemma3, mamba])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_models_get_the_oracles_sums(make, use_reentrant):
    torch.manual_seed(0)
    model = make().train()
    batch = {"ids": torch.randint(0, 31, (3, 6))}
    truth, c = reference(model, batch, losses)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    with FlashEngine(model, max_grad_norm=c) as engine:
        for _ in range(2):
            model.zero_grad()
            private_step(engine, batch, losses)
    model.gradient_checkpointing_disable()
    assert_agrees(model, batch, losses, engine, truth, c)


def clipped_sums(make, budget, use_reentrant):
    """After a second step with dropout, of GPT-2, and blocks that are recomputed where the budget is lean."""
    torch.manual_seed(0)
    model = make().train()
    batch = {"ids": torch.randint(0, 31, (3, 12))}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    with FlashEngine(model, max_grad_norm=0.5, memory_budget=budget) as engine:
        for _ in range(2):
            model.zero_grad()
            torch.manual_seed(1)
            private_step(engine, batch, losses)
    return model, engine


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_blocks_give_the_sums_of_held_ones(make, use_reentrant):
    held, with_held = clipped_sums(make, None, use_reentrant)
    recomputed, engine = clipped_sums(make, "lean", use_reentrant)
    torch.testing.assert_close(engine.norms, with_held.norms, rtol=1e-6, atol=0)
    for expected, found in zip(held.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-5, atol=1e-7)
    assert [row.how for row in engine.explain().blocks] == ["recomputed"] * 2
    assert engine.explain().blocks[1].block in ("transformer.h.1", "model.layers.1")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_adapters_in_checkpointed_blocks_are_exact_under_a_lean_budget(use_reentrant):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = llama().train()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.enable_input_require_grads()
    batch = {"ids": torch.randint(0, 31, (3, 12))}
    truth, c = reference(model, batch, losses)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    with FlashEngine(model, max_grad_norm=c, memory_budget="lean") as engine:
        for _ in range(2):
            model.zero_grad()
            private_step(engine, batch, losses)
    assert len(engine.explain().blocks) == 2
    model.gradient_checkpointing_disable()
    assert_agrees(model, batch, losses, engine, truth, c)
