"""Private training with flash clipping: one ordinary backward pass, no wrapper."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from dpscope.flash.engine import FlashEngine
from dpscope.flash.opacus import DPFlashOptimizer
from dpscope.instruments.phases import BACKWARD, CLIP, NOISE, OPTIMIZER, in_phase, phase
from dpscope.trainers.base import TrainerBase
from dpscope.trainers.privacy_rules import require_private_trainable


class DPFlashClippingTrainer(TrainerBase):
    """Flat clipping, exact, by `dpscope.flash`: norms from what the backward pass leaves, then one sum a layer."""

    def prepare_model(self, model: nn.Module) -> nn.Module:
        require_private_trainable(model)
        self.engine = FlashEngine(model, max_grad_norm=self.settings.max_grad_norm, loss_reduction="mean")
        # Norms and factors are ready when this returns; sums, noise and update then go layer by layer, as one phase.
        self.engine.factored_sums = in_phase(CLIP, self.engine.factored_sums)  # type: ignore[method-assign]
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

    def backward(self, losses: Tensor) -> None:
        with phase(BACKWARD):
            losses.mean().backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        with phase(OPTIMIZER):
            self.optimizer.step()
