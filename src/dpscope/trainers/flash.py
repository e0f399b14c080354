"""Private training with flash clipping: the ordinary loop, with a private optimizer."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from dpscope.flash.engine import FlashEngine
from dpscope.flash.opacus import DPFlashOptimizer
from dpscope.instruments.phases import CLIP, NOISE, in_phase
from dpscope.trainers.privacy_rules import require_private_trainable
from dpscope.trainers.standard import StandardTrainer


class DPFlashClippingTrainer(StandardTrainer):
    """Flat clipping, exact, by `dpscope.flash`: norms from what the backward pass leaves, then one sum a layer."""

    def prepare_model(self, model: nn.Module) -> nn.Module:
        require_private_trainable(model)
        self.engine = FlashEngine(model, max_grad_norm=self.settings.max_grad_norm, loss_reduction="mean")
        # Norms and factors are ready when this returns; sums, noise and update then go layer by layer, as one phase.
        self.engine.factored_sums = in_phase(CLIP, self.engine.factored_sums)  # type: ignore[method-assign]
        self.engine.finish = in_phase(CLIP, self.engine.finish)  # type: ignore[method-assign]
        return model

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        private = DPFlashOptimizer(
            optimizer,
            engine=self.engine,
            noise_multiplier=self.settings.noise_multiplier,
            max_grad_norm=self.settings.max_grad_norm,
            expected_batch_size=self.settings.batch_size,
            generator=self.noise_generator(),
        )
        private.add_noise = in_phase(NOISE, private.add_noise)  # type: ignore[method-assign]
        return private
