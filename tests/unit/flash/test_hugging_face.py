"""Hugging Face's models and PEFT's adapters: exact against micro-batches of one in float64, or refused for a reason."""

from __future__ import annotations

import pytest
import torch

from dpscope.errors import UserError
from dpscope.flash import FlashEngine
from tests.tiny_models.adapters import ADAPTERS
from tests.tiny_models.hugging_face import CLASSES, LENGTH, MODELS, SIDE, VOCABULARY, batch_of, build, class_losses
from tests.unit.flash.agreement import assert_exact, private_step

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.mark.parametrize("name", [*MODELS, *ADAPTERS])
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_people_train_is_exact(name):
    torch.manual_seed(0)
    model, losses = (MODELS | ADAPTERS)[name]
    side = 32 if name == "Bit" else SIDE
    assert_exact(model().train(), batch_of(side=side), losses)


def test_buffers_that_are_made_of_samples_are_refused():
    """I-BERT keeps the ranges of its activations."""
    settings = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = build(
        "AutoModelForSequenceClassification",
        "IBert",
        **{**settings, "num_attention_heads": 2, "max_position_embeddings": 32, "num_labels": CLASSES},
    ).train()
    refused = pytest.raises(UserError, match="is a buffer that forward computes from the samples")
    with FlashEngine(model, max_grad_norm=1.0) as engine, refused:
        private_step(engine, batch_of(), class_losses)


def test_a_contrastive_model_is_refused_because_its_samples_mix():
    """CLIP compares every image with every text."""
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tower, "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "eos_token_id": 1, "pad_token_id": 0}
    vision = {**tower, "image_size": SIDE, "patch_size": 4}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).train()

    def losses(model, batch):
        logits = model(input_ids=batch["ids"], pixel_values=batch["pixels"]).logits_per_text
        return torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)), reduction="none")

    with FlashEngine(model, max_grad_norm=1.0) as engine, pytest.raises(UserError, match="mix"):
        private_step(engine, batch_of(), losses)
