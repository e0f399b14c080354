"""Checkpoints with torch.distributed.checkpoint: written by any number of ranks, read by any other."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
from dpscope.flash.ranks.ranks import release_weights
from dpscope.flash.torch_side.attributes import temporarily


class TrainingState(Stateful):
    """State of a private training for torch.distributed.checkpoint: model, optimizer, privacy spent, noise generator.

    Any number of ranks may load what another number saved. If make_private was given a `noise_generator`, the
    checkpoint is a secret.

    Args:
        model: The private model.
        optimizer: Its private optimizer.
        privacy_engine: The engine that made them private.
        resume_noise: Continue the saved run's noise when loading; see `DPFlashOptimizer.load_state_dict`.

    Example:
        >>> privacy_engine = PrivacyEngine()
        >>> model, private, loader = privacy_engine.make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader,
        ...     noise_multiplier=1.0, max_grad_norm=1.0
        ... )
        >>> state = {"training": TrainingState(model, private, privacy_engine)}
        >>> torch.distributed.checkpoint.save(state, checkpoint_id=folder)
        >>> torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    """

    def __init__(
        self, model: nn.Module, optimizer: DPFlashOptimizer, privacy_engine: Any, *, resume_noise: bool = False
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.privacy_engine = privacy_engine
        self.resume_noise = resume_noise

    def state_dict(self) -> dict[str, Any]:
        release_weights(self.model)
        model, optimizer = get_state_dict(self.model, self.optimizer.original_optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        release_weights(self.model)
        with temporarily(self.optimizer, resumes_noise=self.resume_noise):
            set_state_dict(
                self.model,
                self.optimizer.original_optimizer,
                model_state_dict=state_dict["model"],
                optim_state_dict=state_dict["optimizer"],
            )
