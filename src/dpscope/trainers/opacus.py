"""Private training as Opacus does it: flat clipping of per-sample gradients, and ghost clipping."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleModuleFastGradientClipping,
)
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn
from torch.optim import Optimizer

from dpscope.errors import UserError
from dpscope.instruments.memory import Birth, Holding
from dpscope.instruments.phases import BACKWARD, CLIP, NOISE, OPTIMIZER, in_phase, phase
from dpscope.results.components import ACTIVATION_HOOKS, GRADIENTS, NORM_SAMPLES, PER_SAMPLE_GRADIENTS
from dpscope.trainers.base import TrainerBase
from dpscope.trainers.privacy_rules import require_private_trainable
from dpscope.workloads.workload import Batch

# Opacus's hooks fire for the first layer too, whose input needs no gradient: that is meant, and is said every time.
warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)


# What Opacus hangs on a parameter: attribute -> component. Lists where batches were accumulated.
PARAMETER_HOLDINGS = {
    "grad_sample": PER_SAMPLE_GRADIENTS,
    "_current_grad_sample": PER_SAMPLE_GRADIENTS,
    "_norm_sample": NORM_SAMPLES,
    "summed_grad": GRADIENTS,
}

# What Opacus makes and holds in local variables only: (code, operator) of the birth -> component.
MADE_BY_OPACUS = {
    # The output gradient times the batch size, which stays for as long as a layer's hook works on it.
    ("opacus.grad_sample.grad_sample_module:rearrange_grad_samples", "aten::mul"): ACTIVATION_HOOKS,
    # Norms of one parameter, and of all of them stacked.
    ("opacus.optimizers.optimizer:clip_and_accumulate", "aten::linalg_vector_norm"): NORM_SAMPLES,
    ("opacus.optimizers.optimizer:clip_and_accumulate", "aten::stack"): NORM_SAMPLES,
    # Layers that ghost clipping has no rule for: one layer's per-sample gradients, thrown away after their norm.
    ("opacus.grad_sample.grad_sample_module:create_or_accumulate_grad_sample", "aten::zeros"): PER_SAMPLE_GRADIENTS,
}


def made_by_opacus(birth: Birth) -> str | None:
    return MADE_BY_OPACUS.get((birth.code, birth.operator))


@contextmanager
def _refusals() -> Iterator[None]:
    """What Opacus says it cannot do is a sentence about the model, not a failure of the measurement."""
    try:
        yield
    except NotImplementedError as error:
        if not _raised_by_opacus(error):
            raise
        raise UserError(f"Opacus refuses this model: {_sentence(error)}") from error


def _raised_by_opacus(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).partition(".")[0] == "opacus"


def _sentence(error: BaseException) -> str:
    """Opacus gives a list of exceptions where several layers are refused: the first says enough."""
    reasons = error.args[0] if error.args and isinstance(error.args[0], list) and error.args[0] else [error]
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return " ".join(str(reasons[0]).split()) + more


class _OpacusTrainer(TrainerBase):
    """What flat and ghost share: an Opacus optimizer that makes the gradient private before the step."""

    memory_rules = (made_by_opacus,)
    optimizer: DPOptimizer
    optimizer_class: type[DPOptimizer]

    def train_step(self, batch: Batch) -> Tensor:
        with _refusals():  # some are found out only by hooks, while the model runs
            return super().train_step(batch)

    def holdings(self) -> Iterator[Holding]:
        yield from super().holdings()
        for name, parameter in self.plain_model.named_parameters():
            for attribute, component in PARAMETER_HOLDINGS.items():
                for tensor in _tensors(getattr(parameter, attribute, None)):
                    yield component, name.rpartition(".")[0], tensor
        for tensor in _tensors(getattr(self.model, "_per_sample_gradient_norms", None)):
            yield NORM_SAMPLES, "", tensor
        for path, module in self.plain_model.named_modules():
            for tensor in _tensors(vars(module).get("activations")):
                yield ACTIVATION_HOOKS, path, tensor

    def prepare_optimizer(self, optimizer: Optimizer) -> DPOptimizer:
        private: DPOptimizer = self.optimizer_class(
            optimizer,
            noise_multiplier=self.settings.noise_multiplier,
            max_grad_norm=self.settings.max_grad_norm,
            expected_batch_size=self.settings.batch_size,
            loss_reduction="mean",
            generator=self.noise_generator(),
        )
        private.add_noise = in_phase(NOISE, private.add_noise)
        return private

    def update(self) -> None:
        # DPOptimizer.step, with its two halves told apart: make the gradient private, then step.
        if self.optimizer.pre_step():
            with phase(OPTIMIZER):
                self.optimizer.original_optimizer.step()


class DPSGDTrainer(_OpacusTrainer):
    """Flat clipping: Opacus hooks keep every sample's gradient of every parameter."""

    optimizer_class = DPOptimizer

    def prepare_model(self, model: nn.Module) -> GradSampleModule:
        require_private_trainable(model)
        with _refusals():
            return GradSampleModule(model, batch_first=True, loss_reduction="mean")

    def prepare_optimizer(self, optimizer: Optimizer) -> DPOptimizer:
        private = super().prepare_optimizer(optimizer)
        private.clip_and_accumulate = in_phase(CLIP, private.clip_and_accumulate)
        return private

    def backward(self, losses: Tensor) -> None:
        with phase(BACKWARD):
            losses.mean().backward()  # type: ignore[no-untyped-call]


class DPGhostClippingTrainer(_OpacusTrainer):
    """Ghost clipping: one backward pass for per-sample norms, a second for the gradient of the clipped loss."""

    optimizer_class = DPOptimizerFastGradientClipping

    def prepare_model(self, model: nn.Module) -> GradSampleModuleFastGradientClipping:
        require_private_trainable(model)
        with _refusals():
            wrapped = GradSampleModuleFastGradientClipping(
                model,
                batch_first=True,
                loss_reduction="mean",
                max_grad_norm=self.settings.max_grad_norm,
                use_ghost_clipping=True,
            )
        wrapped.get_clipping_coef = in_phase(CLIP, wrapped.get_clipping_coef)
        return wrapped

    def backward(self, losses: Tensor) -> None:
        with phase(BACKWARD):
            DPTensorFastGradientClipping(self.model, self.optimizer, losses, "mean").backward()


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a tensor, a list of them, a list of lists, or None."""
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, Tensor) else []
