"""PEFT's adapters on a tiny Llama, moved off their zero start."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.tiny_models.hugging_face import MODELS, TinyModel, next_token_losses

_Q = ["q_proj"]
_QV = ["q_proj", "v_proj"]
_PROMPT: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}

# Name -> class of the configuration, and its settings.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 2, "target_modules": _QV}),
    "LoRA on all layers, rank-stabilised": ("LoraConfig", {"r": 2, "use_rslora": True, "target_modules": "all-linear"}),
    "LoRA with biases": ("LoraConfig", {"r": 2, "target_modules": _QV, "bias": "all"}),
    "LoRA on the embedding": ("LoraConfig", {"r": 2, "target_modules": ["embed_tokens", "q_proj"]}),
    "LoRA target_parameters": (
        "LoraConfig",
        {"r": 2, "target_modules": [], "target_parameters": ["self_attn.q_proj.weight"]},
    ),
    "LoRA modules_to_save": ("LoraConfig", {"r": 2, "target_modules": _Q, "modules_to_save": ["lm_head"]}),
    "LoRA trainable tokens": ("LoraConfig", {"r": 2, "target_modules": _Q, "trainable_token_indices": [3, 7]}),
    "DoRA": ("LoraConfig", {"r": 2, "use_dora": True, "target_modules": _QV}),
    "(IA)3": (
        "IA3Config",
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "prompt tuning": ("PromptTuningConfig", _PROMPT),
    "P-tuning": ("PromptEncoderConfig", {**_PROMPT, "encoder_hidden_size": 8}),
    "P-tuning, LSTM": (
        "PromptEncoderConfig",
        {**_PROMPT, "encoder_hidden_size": 8, "encoder_reparameterization_type": "LSTM"},
    ),
    "prefix tuning": ("PrefixTuningConfig", _PROMPT),
    "prefix tuning, projected": (
        "PrefixTuningConfig",
        {**_PROMPT, "prefix_projection": True, "encoder_hidden_size": 8},
    ),
    "VeRA": ("VeraConfig", {"r": 2, "target_modules": _Q}),
    "AdaLoRA": ("AdaLoraConfig", {"r": 2, "target_modules": _Q, "total_step": 10, "tinit": 1, "tfinal": 1}),
    "LoHa": ("LoHaConfig", {"r": 2, "target_modules": _Q}),
    "LoKr": ("LoKrConfig", {"r": 2, "target_modules": _Q}),
    "OFT": ("OFTConfig", {"r": 2, "oft_block_size": 0, "target_modules": _Q}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4, "target_modules": _Q}),
    "HRA": ("HRAConfig", {"r": 2, "target_modules": _Q}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 8, "target_modules": _Q}),
    "LN tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "post_attention_layernorm"]}),
}


def _off_zero(model: nn.Module) -> Any:
    """Adapters that begin as zeros hide what they multiply."""
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.detach().any():
            with torch.no_grad():
                parameter.normal_(0, 0.1)
    return model


def adapted(kind: str) -> Any:
    import peft

    name, settings = _CONFIGS[kind]
    return _off_zero(peft.get_peft_model(MODELS["Llama"].build(), getattr(peft, name)(**settings)))


def with_several_adapters() -> Any:
    """Two adapters, both active and trained."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=_QV)
    model = peft.get_peft_model(MODELS["Llama"].build(), config)
    model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["k_proj", "v_proj"]))
    model.base_model.set_adapter(["default", "other"])
    return _off_zero(model)


ADAPTERS: dict[str, TinyModel] = {
    **{kind: TinyModel(partial(adapted, kind), next_token_losses) for kind in _CONFIGS},
    "several adapters": TinyModel(with_several_adapters, next_token_losses),
}
