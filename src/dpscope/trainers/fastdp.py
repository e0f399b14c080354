"""fastDP (github.com/awslabs/fast-differential-privacy): book-keeping, one backward pass.

As its README runs it: `PrivacyEngine(model, …, clipping_mode="MixOpt")`, `attach(optimizer)`, and the usual loop. Two
settings differ from its defaults so that the step is the one that is compared: `clipping_fn="Abadi"` (clipping at C;
its default normalises every sample instead) and `max_grad_norm`.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

from fastDP import PrivacyEngine
from torch import nn
from torch.optim import Optimizer

from dpscope.errors import UserError
from dpscope.trainers.base import TrainerBase, require_flat, require_private_trainable
from dpscope.vocabulary.phases import NOISE, in_phase

SAMPLES_AND_EPOCHS = {"sample_size": 10**6, "epochs": 1}  # of its accountant, which is not asked


class FastDPTrainer(TrainerBase):
    """fastDP 2.0 with flat clipping over all layers."""

    def require_model(self, model: nn.Module) -> None:
        require_flat(self.settings.clipping)
        require_private_trainable(model)
        if self.settings.checkpoint_blocks:
            raise UserError("fastDP's hooks do not see checkpointed blocks: leave out --checkpoint-blocks")

    def prepare_model(self, model: nn.Module) -> nn.Module:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it found
            self.privacy = PrivacyEngine(
                model,
                batch_size=self.settings.logical_batch_size,
                noise_multiplier=self.settings.noise_multiplier,
                max_grad_norm=self.settings.max_grad_norm,
                clipping_mode="MixOpt",
                clipping_fn="Abadi",
                clipping_style="all-layer",
                **SAMPLES_AND_EPOCHS,
            )
        return model

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self.privacy.attach(optimizer)
        attached: Any = self.privacy
        attached._create_noisy_clipped_gradient = in_phase(NOISE, attached._create_noisy_clipped_gradient)
        return optimizer
