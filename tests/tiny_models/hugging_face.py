"""Hugging Face's models by configuration, tiny: two layers, width 16; with a batch of four and one loss a sample.

Nothing random is left in them: dropout is off. Experts run eagerly: torch's grouped product has no float64 on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, SAMPLES, CLASSES, SIDE = 31, 9, 4, 3, 16

Batch = dict[str, Tensor]


class TinyModel(NamedTuple):
    """`build` makes the model; `losses(model, batch)` gives one loss a sample."""

    build: Callable[[], Any]
    losses: Callable[[nn.Module, Batch], Tensor]


def batch_of(seed: int = 3, samples: int = SAMPLES, side: int = SIDE) -> Batch:
    """Tokens `ids` (B, T) from 2 up, two rows of which are padded at the end (`mask`), pixels, and classes."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (samples, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1::4, 5:] = mask[3::4, 7:] = 0
    classes = torch.randint(CLASSES, (samples,), generator=generator)
    pixels = torch.randn(samples, 3, side, side, generator=generator)
    return {"ids": ids, "mask": mask, "classes": classes, "pixels": pixels}


def next_token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Prompts that a model puts in front of its tokens have no labels."""
    logits = model(input_ids=batch["ids"]).logits[:, -LENGTH:-1]
    return F.cross_entropy(logits.transpose(1, 2), batch["ids"][:, 1:], reduction="none").mean(1)


def class_losses(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
    return F.cross_entropy(logits, batch["classes"], reduction="none")


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits
    losses = F.cross_entropy(logits.transpose(1, 2), batch["ids"], reduction="none")
    return (losses * batch["mask"]).sum(1) / batch["mask"].sum(1)


def sequence_losses(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["ids"], decoder_input_ids=batch["ids"]).logits
    return F.cross_entropy(logits.transpose(1, 2), batch["ids"], reduction="none").mean(1)


def image_losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["pixels"]).logits, batch["classes"], reduction="none")


def without_dropout(model: nn.Module) -> nn.Module:
    """Switch off whatever drops something, in modules and in configurations."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for key, value in vars(module).items():
            if isinstance(value, float) and "drop" in key:
                setattr(module, key, 0.0)
    config: Any = getattr(model, "config", None)
    for key in [] if config is None else vars(config):
        if "dropout" in key or key.endswith("pdrop"):
            setattr(config, key, 0.0)
    return model


def build(auto: str, family: str, **settings: Any) -> nn.Module:
    """Make a model of `AutoModel…` class `auto` from the configuration of a family."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**settings)
    config._experts_implementation = "eager"
    return without_dropout(getattr(transformers, auto).from_config(config))


_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
DECODER = {
    **_TOKENS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_GPT = {**_TOKENS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
_ENCODER = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "num_labels": CLASSES,
}
_SEQUENCES = {
    **_TOKENS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
}
_T5 = {**_TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
_VIT = {
    "image_size": SIDE,
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_labels": CLASSES,
}
_SWIN = {
    "image_size": SIDE,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "window_size": 4,
    "num_labels": CLASSES,
}
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": CLASSES}
_EXPERTS = {"num_experts_per_tok": 2}
_LOCAL = {**DECODER, **_EXPERTS, "num_local_experts": 4}
_ROUTED = {**DECODER, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 8}
_NARROW = {**DECODER, "head_dim": 4}

_CAUSAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("Llama", "Mistral", "Qwen2", "Phi", "Phi3", "Olmo2", "StableLm", "Cohere", "Granite", "Starcoder2"), DECODER
    ),
    **dict.fromkeys(("SmolLM3", "Nemotron", "Persimmon", "GPTNeoX", "Ernie4_5", "Arcee", "Exaone4"), DECODER),
    **dict.fromkeys(("Qwen3", "Gemma", "Gemma2", "Gemma3Text", "VaultGemma", "Helium", "Glm"), _NARROW),
    **dict.fromkeys(("Ministral", "HunYuanDenseV1"), _NARROW),
    **dict.fromkeys(("Mixtral", "GraniteMoe"), _LOCAL),
    **dict.fromkeys(("Qwen3Moe", "Olmoe"), _ROUTED),
    "GptOss": {**_LOCAL, "head_dim": 4},
    "Qwen2Moe": {**_ROUTED, "shared_expert_intermediate_size": 8},
    "DeepseekV3": {
        **{**DECODER, "num_key_value_heads": 4},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
        **{"moe_intermediate_size": 8, "first_k_dense_replace": 1, "kv_lora_rank": 4, "q_lora_rank": 4},
        **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4},
    },
    "GPT2": _GPT,
    "GPTJ": {**_GPT, "rotary_dim": 4},
    "GPTBigCode": _GPT,
    "GPTNeo": {
        **{**_TOKENS, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 32},
        "attention_types": [[["global", "local"], 1]],
    },
    "CodeGen": {**_GPT, "n_head": 4, "rotary_dim": 4},
    "Bloom": {**_TOKENS, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "Mpt": {**_TOKENS, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32},
    "Falcon": {**_TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "OPT": {**DECODER, "ffn_dim": 24, "num_attention_heads": 2, "word_embed_proj_dim": 16},
    "BioGpt": {**DECODER, "num_attention_heads": 2},
    "Mamba": {**_TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    "Rwkv": {
        **{**_TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16},
        **{"intermediate_size": 24, "context_length": 32},
    },
}
_CLASSIFIERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Bert", "Roberta", "XLMRoberta", "Camembert", "MPNet", "FNet", "BigBird"), _ENCODER),
    **dict.fromkeys(("RoFormer", "MegatronBert", "LayoutLM", "XLMRobertaXL"), _ENCODER),
    **{family: {**_ENCODER, "embedding_size": 8} for family in ("Electra", "Albert")},
    "DistilBert": {
        **{"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
        **{"max_position_embeddings": 32, "num_labels": CLASSES},
    },
    "DebertaV2": {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
    "Deberta": {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 16},
    "Longformer": {**_ENCODER, "attention_window": [4, 4]},
    "ModernBert": {**_ENCODER, "cls_token_id": 1, "sep_token_id": 1, "bos_token_id": 1, "eos_token_id": 1},
    "Funnel": {
        **{"vocab_size": VOCABULARY, "d_model": 16, "d_inner": 24, "n_head": 2, "d_head": 8, "block_sizes": [1, 1]},
        **{"num_decoder_layers": 1, "num_labels": CLASSES},
    },
    "ConvBert": {**_ENCODER, "embedding_size": 16},
    "SqueezeBert": {
        **{**_ENCODER, "embedding_size": 16},
        **dict.fromkeys(("q_groups", "k_groups", "v_groups"), 1),
        **dict.fromkeys(("post_attention_groups", "intermediate_groups", "output_groups"), 1),
    },
    "Nystromformer": {**_ENCODER, "num_landmarks": LENGTH, "segment_means_seq_len": LENGTH},
    "MobileBert": {**_ENCODER, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
}
_TRANSLATORS: dict[str, dict[str, Any]] = {
    "T5": _T5,
    "MT5": _T5,
    "Bart": _SEQUENCES,
    "Pegasus": _SEQUENCES,
    "Marian": _SEQUENCES,
    "MBart": _SEQUENCES,
}
_VISION: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("ViT", "Beit", "Dinov2"), _VIT),
    "DeiT": {**_VIT, "architectures": ["DeiTForImageClassification"]},
    **dict.fromkeys(("Swin", "Swinv2"), _SWIN),
    **{family: {**_STAGES, "num_stages": 2, "patch_size": 2} for family in ("ConvNext", "ConvNextV2")},
    "Segformer": {
        **{**_STAGES, "num_encoder_blocks": 2, "num_attention_heads": [1, 2], "sr_ratios": [2, 1]},
        **{"patch_sizes": [3, 3], "strides": [2, 2], "mlp_ratios": [2, 2]},
    },
    "PoolFormer": {
        **{**_STAGES, "num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2], "padding": [1, 1]},
    },
    "Bit": {**_STAGES, "embedding_size": 8, "num_groups": 4},
}


def _table(auto: str, families: dict[str, dict[str, Any]], losses: Any) -> dict[str, TinyModel]:
    def builder(family: str, settings: dict[str, Any]) -> Callable[[], nn.Module]:
        return lambda **changes: build(auto, family, **{**settings, **changes})

    return {family: TinyModel(builder(family, settings), losses) for family, settings in families.items()}


MODELS: dict[str, TinyModel] = {
    **_table("AutoModelForCausalLM", _CAUSAL, next_token_losses),
    **_table("AutoModelForSequenceClassification", _CLASSIFIERS, class_losses),
    **_table("AutoModelForSeq2SeqLM", _TRANSLATORS, sequence_losses),
    **_table("AutoModelForImageClassification", _VISION, image_losses),
}
"""By family: AutoModel's choice for what it is trained for most."""
