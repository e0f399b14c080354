"""`PrivateSFTTrainer`: TRL's SFTTrainer whose steps are private."""

from __future__ import annotations

from dataclasses import dataclass

from trl import SFTConfig, SFTTrainer

from dpscope.transformers.arguments import PrivacyArguments
from dpscope.transformers.trainer import PrivateTrainerMixin


@dataclass
class PrivateSFTConfig(PrivacyArguments, SFTConfig):
    """`SFTConfig` with the privacy arguments as fields."""


class PrivateSFTTrainer(PrivateTrainerMixin, SFTTrainer):
    """TRL's `SFTTrainer` whose steps are private: the same arguments, and those of `PrivacyArguments`.

    Texts, prompts with completions and conversations are prepared as TRL does; the loss is a mean over each sample's
    own tokens, where TRL divides by those of the batch.

    Example:
        >>> trainer = PrivateSFTTrainer(model=model, train_dataset=data, target_epsilon=3.0, target_delta=1e-5)
    """
