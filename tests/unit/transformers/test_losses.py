"""The loss of each sample is the model's own loss of that sample alone."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from dpscope.errors import UserError
from dpscope.transformers.steps import sample_losses
from tests.unit.transformers.small_training import Counting, collate, small_llama

BERT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
}


def tokens(labels):
    batch = collate([Counting()[index] for index in range(3)])
    return {**batch, "labels": batch["labels"] if labels is None else labels}


def bert(kind, labels=None, **options):
    return kind(BertConfig(**BERT, **options)), tokens(labels)


def vit():
    sizes = {name: value for name, value in BERT.items() if name in ViTConfig().to_dict()}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=5))
    return model, {"pixel_values": torch.randn(3, 3, 8, 8), "labels": torch.tensor([0, 4, 2])}


def t5():
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config), tokens(None)


CASES = {
    "causal": lambda: (small_llama(), tokens(None)),
    "masked": lambda: bert(BertForMaskedLM),
    "classes of tokens": lambda: bert(BertForTokenClassification, num_labels=32),
    "one label": lambda: bert(BertForSequenceClassification, torch.tensor([0, 2, 1]), num_labels=3),
    "several labels": lambda: bert(
        BertForSequenceClassification, torch.eye(3), num_labels=3, problem_type="multi_label_classification"
    ),
    "regression": lambda: bert(BertForSequenceClassification, torch.tensor([0.1, 2.0, -1.0]), num_labels=1),
    "images": vit,
    "encoder and decoder": t5,
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_is_that_of_the_sample_alone(case):
    torch.manual_seed(0)
    model, batch = CASES[case]()
    model.eval()
    with torch.no_grad():
        rest = {name: value for name, value in batch.items() if name != "labels"}
        if case == "encoder and decoder":
            rest["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        losses = sample_losses(model, model(**rest), batch["labels"])
        alone = [model(**{name: value[row : row + 1] for name, value in batch.items()}).loss for row in range(3)]
    torch.testing.assert_close(losses, torch.stack(alone), rtol=1e-4, atol=1e-6)


def test_smoothing_is_torchs():
    model = small_llama()
    logits = torch.randn(2, 4, 8)
    labels = torch.tensor([[1, 2, 3, -100], [4, -100, 5, 6]])
    outputs = {"logits": logits}
    losses = sample_losses(model, outputs, labels, smoothing=0.2)
    for row in range(2):
        expected = torch.nn.functional.cross_entropy(logits[row, :-1], labels[row, 1:], label_smoothing=0.2)
        torch.testing.assert_close(losses[row], expected)


def test_a_sample_without_labels_has_a_loss_of_zero():
    labels = torch.tensor([[-100, -100], [1, 2]])
    assert sample_losses(small_llama(), {"logits": torch.randn(2, 2, 8)}, labels)[0] == 0


def test_an_unknown_loss_is_refused_with_what_to_override():
    with pytest.raises(UserError, match="override sample_losses"):
        sample_losses(small_llama(), {"logits": torch.randn(2, 2, 8, 8)}, torch.zeros(2))
