"""Hugging Face's Trainer and TRL's SFTTrainer, private (docs/trainer.md).

Names are loaded when they are asked for; importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dpscope.packages import require

if TYPE_CHECKING:
    from dpscope.transformers.arguments import PrivacyArguments, PrivateTrainingArguments
    from dpscope.transformers.sft import PrivateSFTConfig, PrivateSFTTrainer
    from dpscope.transformers.trainer import PrivateTrainer, PrivateTrainerMixin

_HOME = {
    "PrivacyArguments": "arguments",
    "PrivateSFTConfig": "sft",
    "PrivateSFTTrainer": "sft",
    "PrivateTrainer": "trainer",
    "PrivateTrainerMixin": "trainer",
    "PrivateTrainingArguments": "arguments",
}

__all__ = [
    "PrivacyArguments",
    "PrivateSFTConfig",
    "PrivateSFTTrainer",
    "PrivateTrainer",
    "PrivateTrainerMixin",
    "PrivateTrainingArguments",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("transformers", "accelerate", *(("trl", "datasets") if _HOME[name] == "sft" else ()))
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
