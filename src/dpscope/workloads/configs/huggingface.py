"""Architectures of Hugging Face, named by their own configurations. transformers itself is not imported here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from dpscope.errors import UserError
from dpscope.workloads.configs.base import (
    MAX_MODULES,
    WorkloadConfig,
    refuse_foreign_sizes,
    refuse_length,
    require_divisible,
    resolve_length,
    whole_size,
)

CAUSAL_LM, SEQUENCE_CLASSIFICATION, IMAGE_CLASSIFICATION = (
    "causal language modelling",
    "sequence classification",
    "image classification",
)

# How the name of an architecture ends -> what it is trained for.
_TASK_OF_ENDING = {
    "ForCausalLM": CAUSAL_LM,
    "LMHeadModel": CAUSAL_LM,
    "ForSequenceClassification": SEQUENCE_CLASSIFICATION,
    "ForImageClassification": IMAGE_CLASSIFICATION,
}

# Our name of a size -> what configurations call it. The name that a configuration has is the one that is changed.
_SIZE_NAMES: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_dim": ("hidden_size", "n_embd", "d_model", "dim"),
    "intermediate_dim": ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "max_seq_len": ("max_position_embeddings", "n_positions"),
    "image_size": ("image_size",),
    "patch_size": ("patch_size",),
    "num_classes": ("num_labels",),
}

OUR_SIZES = {theirs: ours for ours, names in _SIZE_NAMES.items() for theirs in names}

_COUNTS_MODULES = re.compile("layer|block|expert|depth|stage")

# What a published file says beyond the architecture: number formats are --dtype's to decide, weights are random.
_NOT_THE_ARCHITECTURE = ("dtype", "torch_dtype", "quantization_config", "transformers_version", "_name_or_path")


@dataclass(frozen=True, kw_only=True)
class HuggingFaceConfig(WorkloadConfig):
    """An architecture of transformers with random weights; nothing is downloaded."""

    kind: ClassVar[str] = "huggingface"
    builder: ClassVar[str] = "dpscope.workloads.huggingface:build"

    model_type: str  # "gpt2": names the configuration class
    architecture: str  # "GPT2LMHeadModel": names the model class
    settings: Mapping[str, Any] = field(hash=False)  # in the configuration's own words

    def __post_init__(self) -> None:
        self.task  # noqa: B018 - refuses an architecture that has no loss here
        for size in _SIZE_NAMES:
            value = self.size(size)
            if value is not None and not isinstance(value, list):  # sides of an image, heads of each stage
                whole_size(size, value)
        _require_few_modules(self.settings)
        sizes = (self.size(name) for name in ("hidden_dim", "num_heads", "kv_heads"))
        hidden, heads, shared = (None if isinstance(size, list) else size for size in sizes)
        if hidden and heads and self.settings.get("head_dim") is None:
            require_divisible(hidden, heads)
        if heads and shared and heads % shared:
            raise UserError(
                f"{heads} attention heads are not divisible by {shared} key-value heads: "
                "change --num-heads or --kv-heads"
            )

    @property
    def task(self) -> str:
        for ending, task in _TASK_OF_ENDING.items():
            if self.architecture.endswith(ending):
                return task
        raise UserError(
            f'dpscope has no loss for the architecture {self.architecture!r}: name one in "architectures" that ends '
            f"in {', '.join(_TASK_OF_ENDING)}, or bring the model and its loss with --workload"
        )

    def size(self, name: str) -> Any:
        """Return a size under our name; None if the configuration does not say."""
        key = self._key(name)
        return None if key is None else self.settings[key]

    def _key(self, size: str) -> str | None:
        return next((key for key in _SIZE_NAMES[size] if key in self.settings), None)

    def resolve_seq_len(self, seq_len: int | None) -> int | None:
        if self.task == IMAGE_CLASSIFICATION:
            refuse_length(seq_len, self.name)
            return None
        return resolve_length(seq_len, self.size("max_seq_len"), self.name)

    def resized(self, **sizes: Any) -> HuggingFaceConfig:
        """Return the config with other sizes. An unset feed-forward width stays in proportion to the hidden size."""
        keys = {name: self._key(name) if name in _SIZE_NAMES else None for name in sizes}
        refuse_foreign_sizes(self.name, {name for name, key in keys.items() if key is None})
        changed = {str(keys[name]): whole_size(name, value) for name, value in sizes.items()}
        wide, inner = self._key("hidden_dim"), self._key("intermediate_dim")
        if wide in changed and inner is not None and inner not in changed and self.settings[inner] is not None:
            changed[inner] = max(1, self.settings[inner] * changed[wide] // self.settings[wide])
        return replace(self, settings={**self.settings, **changed})


def _require_few_modules(settings: Mapping[str, Any]) -> None:
    """Refuse huge numbers of layers, experts or stages, under any name, also in nested configurations."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            _require_few_modules(value)
        for count in value if isinstance(value, list) else [value]:
            if _COUNTS_MODULES.search(name) and isinstance(count, int) and count > MAX_MODULES:
                raise UserError(f"{name} must be a whole number of at most {MAX_MODULES}, not {count}")


def config_from_file(path: Path) -> HuggingFaceConfig:
    """Return the architecture that a `config.json` describes."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        hub = ". Names of models on the hub are never fetched: save its config.json, and give that file"
        is_name = not path.exists() and len(path.parts) == 2 and not path.suffix
        raise UserError(f"--hf-config {path}: {error.strerror}{hub if is_name else ''}") from None
    except UnicodeDecodeError:
        raise UserError(f"--hf-config {path}: not JSON") from None
    return config_from_json(text, source=str(path))


def config_from_json(text: str, *, source: str = "{…}") -> HuggingFaceConfig:
    """Return the architecture from the text of a `config.json`; `source` is its name in errors."""
    try:
        data = json.loads(text)
    except ValueError:
        raise UserError(f"--hf-config {source}: not JSON") from None
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise UserError(f'--hf-config {source}: not the configuration of a model, for it has no "model_type"')
    architectures = data.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise UserError(
            f'--hf-config {source}: which model of type {data["model_type"]!r}? Add "architectures": [NAME], where '
            f"NAME ends in {', '.join(_TASK_OF_ENDING)}"
        )
    aside = ("model_type", "architectures", *_NOT_THE_ARCHITECTURE)
    settings = {key: value for key, value in data.items() if key not in aside}
    if labels := settings.pop("id2label", None):
        settings.setdefault("num_labels", len(labels))
    settings.pop("label2id", None)
    settings.setdefault("num_labels", 2)
    name = f"hf:{data['model_type']}"
    return HuggingFaceConfig(name=name, model_type=data["model_type"], architecture=architectures[0], settings=settings)


# The published sizes of each, in the words of its configuration.
_SIZES: dict[tuple[str, str], dict[str, Any]] = {
    # GPT-2 small, 124M parameters; the output layer is the token embedding
    ("gpt2", "GPT2LMHeadModel"): {
        **{"vocab_size": 50257, "n_embd": 768, "n_inner": 3072, "n_layer": 12, "n_head": 12, "n_positions": 1024}
    },
    # as Llama 3.2 1B, 1.24B parameters
    ("llama", "LlamaForCausalLM"): {
        **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        "tie_word_embeddings": True,
    },
    # BERT base, 110M parameters
    ("bert", "BertForSequenceClassification"): {
        **{"vocab_size": 30522, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
        **{"num_attention_heads": 12, "max_position_embeddings": 512, "num_labels": 2},
    },
    # ViT-B/16, 86M parameters
    ("vit", "ViTForImageClassification"): {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"image_size": 224, "patch_size": 16, "num_labels": 1000},
    },
}
_PUBLISHED = tuple(
    HuggingFaceConfig(name=f"hf:{kind}", model_type=kind, architecture=architecture, settings=sizes)
    for (kind, architecture), sizes in _SIZES.items()
)

# As Llama 3.1 8B, 8.03B parameters: one GPU trains adapters on it (--lora) with the weights in bf16 (--param-dtype).
_WIDER = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False}
_LLAMA_8B = replace(_PUBLISHED[1], name="hf:llama-8b", settings={**_PUBLISHED[1].settings, **_WIDER})

# The same architectures for a CPU: a step takes milliseconds.
_TINY = {"vocab_size": 1000, "hidden_dim": 64, "num_layers": 2, "num_heads": 4, "kv_heads": 2, "max_seq_len": 128}
_TINY |= {"image_size": 32, "patch_size": 8, "num_classes": 10}


def _tiny(config: HuggingFaceConfig) -> HuggingFaceConfig:
    sizes = {name: value for name, value in _TINY.items() if config._key(name) is not None}
    return replace(config.resized(**sizes), name=f"{config.name}-tiny")


PRESETS = (*_PUBLISHED, _LLAMA_8B, *map(_tiny, _PUBLISHED))
