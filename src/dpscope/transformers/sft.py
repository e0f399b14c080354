"""`PrivateSFTTrainer`: TRL's SFTTrainer whose steps are private."""

from __future__ import annotations

from dataclasses import dataclass

from trl import SFTConfig, SFTTrainer

from dpscope.transformers.arguments import PrivacyArguments
from dpscope.transformers.trainer import PrivateTrainerMixin


@dataclass
class PrivateSFTConfig(PrivacyArguments, SFTConfig):
    """TRL's `SFTConfig` with the fields of `PrivacyArguments`.

    Args:
        **kwargs: Fields of `SFTConfig` and of `PrivacyArguments`.

    Example:
        >>> from dpscope.transformers import PrivateSFTConfig
        >>> args = PrivateSFTConfig(output_dir="out", target_epsilon=3.0, target_delta=1e-5, bf16=False)
    """


class PrivateSFTTrainer(PrivateTrainerMixin, SFTTrainer):
    """TRL's `SFTTrainer` whose steps are private.

    Data is prepared as TRL does. The loss is a mean over each sample's own tokens; TRL divides by those of the batch.

    Args:
        model: The model, or its name.
        args: An `SFTConfig` or `PrivateSFTConfig`.
        *rest: Further arguments of `SFTTrainer` by position.
        **keywords: Further arguments of `SFTTrainer`, and fields of `PrivacyArguments`.

    Raises:
        UserError: A setting cannot be private, or a privacy argument is missing.

    Example:
        >>> from dpscope.transformers import PrivateSFTTrainer
        >>> trainer = PrivateSFTTrainer(  # doctest: +SKIP
        ...     model=model, args=args, train_dataset=data, target_epsilon=3.0, target_delta=1e-5
        ... )
        >>> trainer.train()  # doctest: +SKIP
    """
