"""Hugging Face's Trainer and TRL's SFTTrainer, private (docs/trainer.md).

Names are loaded when they are asked for; importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpscope.packages import require
from dpscope.places import names_at

if TYPE_CHECKING:
    from dpscope.transformers.arguments import PrivacyArguments as PrivacyArguments
    from dpscope.transformers.arguments import PrivateTrainingArguments as PrivateTrainingArguments
    from dpscope.transformers.sft import PrivateSFTConfig as PrivateSFTConfig
    from dpscope.transformers.sft import PrivateSFTTrainer as PrivateSFTTrainer
    from dpscope.transformers.trainer import PrivateTrainer as PrivateTrainer
    from dpscope.transformers.trainer import PrivateTrainerMixin as PrivateTrainerMixin

_load, __all__ = names_at(
    __name__,
    {
        "arguments": "PrivacyArguments PrivateTrainingArguments",
        "sft": "PrivateSFTConfig PrivateSFTTrainer",
        "trainer": "PrivateTrainer PrivateTrainerMixin",
    },
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        require("transformers", "accelerate", *(("trl", "datasets") if "SFT" in name else ()))
    return _load(name)


def __dir__() -> list[str]:
    return sorted(__all__)
