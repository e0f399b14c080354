"""Models of Hugging Face: any architecture that is trained for next tokens or for classes, with random weights.

Masks and positions have a row for each sample, because Opacus reads per-sample gradients off dimension 0. Dropout is
off: a sample alone would draw other numbers than in its batch.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.packages import import_for
from dpscope.workloads.configs.huggingface import (
    CAUSAL_LM,
    IMAGE_CLASSIFICATION,
    SEQUENCE_CLASSIFICATION,
    HuggingFaceConfig,
)
from dpscope.workloads.workload import Workload

HFBatch = dict[str, Tensor]


def build(config: HuggingFaceConfig, *, batch_size: int, seq_len: int | None) -> Workload:
    os.environ["HF_HUB_OFFLINE"] = "1"  # random weights: there is nothing to fetch, ever
    transformers = import_for(f"model {config.name!r}", "transformers")
    transformers.logging.set_verbosity_error()  # small vocabularies leave out published token ids: no matter here
    architecture = getattr(transformers, config.architecture, None)
    if architecture is None:
        raise UserError(
            f"transformers {transformers.__version__} has no architecture {config.architecture!r}: check "
            '"architectures" in the configuration'
        )
    settings = _settings(transformers, config)
    return Workload(
        model=partial(_make_model, architecture, settings),
        batch=partial(_make_batch, config, architecture, settings, batch_size, seq_len),
        loss=TASKS[config.task].loss,
    )


def _settings(transformers: ModuleType, config: HuggingFaceConfig) -> Any:
    """Return the transformers configuration, without dropout and caches, which make steps incomparable."""
    if config.model_type not in transformers.CONFIG_MAPPING:
        raise UserError(
            f"transformers {transformers.__version__} knows no model of type {config.model_type!r}: check "
            '"model_type" in the configuration'
        )
    try:
        settings = transformers.AutoConfig.for_model(config.model_type, **config.settings)
    except Exception as error:  # each version of transformers has its own ways to refuse
        raise UserError(f"transformers refuses the configuration of {config.name!r}: {_last_line(error)}") from None
    for key, value in settings.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(settings, key, 0.0)
    settings.use_cache = False
    if config.task == SEQUENCE_CLASSIFICATION and settings.pad_token_id is None:
        settings.pad_token_id = 0
    return settings


def _make_model(architecture: type[nn.Module], settings: Any) -> nn.Module:
    try:
        # The attention that transformers takes by itself is scaled_dot_product_attention where the model has it.
        return architecture(copy.deepcopy(settings)).train()
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"transformers cannot build {architecture.__name__}: {_last_line(error)}") from None


def _make_batch(
    config: HuggingFaceConfig,
    architecture: type[nn.Module],
    settings: Any,
    batch_size: int,
    seq_len: int | None,
    seed: int,
    device: torch.device,
) -> HFBatch:
    make = TASKS[config.task].make_batch
    batch = make(settings, batch_size, config.resolve_seq_len(seq_len) or 1, torch.Generator().manual_seed(seed))
    accepted = {"labels", "pixel_values", *inspect.signature(architecture.forward).parameters}
    if "roberta" in config.model_type:  # counts positions from its padding id, for each sample, by itself
        accepted -= {"position_ids"}
    return {name: value.to(device) for name, value in batch.items() if name in accepted}


def _tokens(settings: Any, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Return random tokens, none of them the padding token."""
    tokens = torch.randint(settings.vocab_size, shape, generator=generator)
    padding = getattr(settings, "pad_token_id", None)
    return tokens if padding is None else torch.where(tokens == padding, (padding + 1) % settings.vocab_size, tokens)


def _positions(batch_size: int, length: int) -> Tensor:
    return torch.arange(length).repeat(batch_size, 1)  # (B, T), a row of its own for each sample


def _next_tokens(settings: Any, batch_size: int, length: int, generator: torch.Generator) -> HFBatch:
    tokens = _tokens(settings, (batch_size, length + 1), generator)
    return {
        "input_ids": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        # All ones, given so that models do not look for packed sequences.
        "attention_mask": torch.ones(batch_size, length, dtype=torch.long),
        "position_ids": _positions(batch_size, length),
    }


def _padded_sequences(settings: Any, batch_size: int, length: int, generator: torch.Generator) -> HFBatch:
    """Return sequences of different lengths, from half the longest to all of it, padded on the right."""
    lengths = torch.randint((length + 1) // 2, length + 1, (batch_size, 1), generator=generator)
    mask = _positions(batch_size, length) < lengths
    ids = _tokens(settings, (batch_size, length), generator)
    end = getattr(settings, "eos_token_id", None)
    if getattr(settings, "is_encoder_decoder", False) and isinstance(end, int):  # which reads the class at the end
        ids = torch.where(ids == end, (end + 1) % settings.vocab_size, ids).scatter(1, lengths - 1, end)
    batch = {
        "input_ids": torch.where(mask, ids, settings.pad_token_id),
        "labels": torch.randint(settings.num_labels, (batch_size,), generator=generator),
        "attention_mask": mask.long(),
        "position_ids": _positions(batch_size, length),
    }
    if getattr(settings, "type_vocab_size", 0):
        batch["token_type_ids"] = torch.zeros(batch_size, length, dtype=torch.long)
    return batch


def _images(settings: Any, batch_size: int, length: int, generator: torch.Generator) -> HFBatch:
    size = getattr(settings, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(settings, "num_channels", 3)
    return {
        "pixel_values": torch.randn(batch_size, channels, height, width, generator=generator),
        "labels": torch.randint(settings.num_labels, (batch_size,), generator=generator),
    }


def _logits(model: nn.Module, batch: HFBatch) -> Tensor:
    logits: Tensor = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return logits


def hf_token_loss(model: nn.Module, batch: HFBatch) -> Tensor:
    """Return the cross-entropy of the next token, averaged over each sample's tokens: (B,)."""
    labels = batch["labels"]
    losses = F.cross_entropy(_logits(model, batch).flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view_as(labels).mean(dim=1)


def hf_class_loss(model: nn.Module, batch: HFBatch) -> Tensor:
    """Return the cross-entropy of the class of each sample: (B,)."""
    return F.cross_entropy(_logits(model, batch), batch["labels"], reduction="none")


class Task(NamedTuple):
    make_batch: Callable[[Any, int, int, torch.Generator], HFBatch]  # (settings, batch size, length, generator)
    loss: Callable[[nn.Module, HFBatch], Tensor]


TASKS = {
    CAUSAL_LM: Task(_next_tokens, hf_token_loss),
    SEQUENCE_CLASSIFICATION: Task(_padded_sequences, hf_class_loss),
    IMAGE_CLASSIFICATION: Task(_images, hf_class_loss),
}


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
