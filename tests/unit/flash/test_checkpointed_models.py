"""Hugging Face models whose layers run through vmap, with gradient_checkpointing_enable()."""

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
