"""Arguments of make_private, as users of Opacus write them: supported ones, and refusals of the others."""

from __future__ import annotations

import math
import numbers
import warnings
from typing import Any

from opacus.grad_sample import AbstractGradSampleModule
from opacus.validators.errors import UnsupportedModuleError
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpscope.errors import UserError
from dpscope.flash.engine import LOSS_REDUCTIONS, FlashEngine
from dpscope.flash.layers.plan import Ladder
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
from dpscope.flash.ranks.layout import layout_of
from dpscope.flash.taps.taps import EngineTap
from dpscope.flash.torch_side.frames import original_of, require_module
from dpscope.flash.torch_side.instance_method import instance_method

FLASH = "flash"  # grad_sample_mode


class UnsupportedModelError(UserError, UnsupportedModuleError):
    """Error for a model that cannot be made private as it is. It is Opacus's `UnsupportedModuleError` too.

    Example:
        >>> try:
        ...     PrivacyEngine().validate(module=torch.nn.BatchNorm1d(4))
        ... except UnsupportedModelError as error:
        ...     print("use GroupNorm:", error)  # doctest: +ELLIPSIS
        use GroupNorm: ...
    """


def check_arguments(
    module: nn.Module,
    *,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    noise_multiplier: float,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    criterion: Any = None,
    **kwargs: Any,
) -> None:
    """Refuse arguments that Opacus accepts, or fails on later, and flash clipping does not support."""
    if isinstance(module, AbstractGradSampleModule):
        raise UnsupportedModelError(
            "the model is already private (wrapped by Opacus): pass the original module, model._module, instead"
        )
    if not isinstance(noise_multiplier, float) or not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise UserError(f"noise_multiplier must be one number, zero or more, not {noise_multiplier!r}")
    if not batch_first:
        raise UserError("flash clipping needs the batch as the first dimension: batch_first=True")
    if loss_reduction not in LOSS_REDUCTIONS:
        raise UserError(f"loss_reduction must be 'mean' or 'sum' over samples, not {loss_reduction!r}")
    if criterion is not None and getattr(criterion, "reduction", loss_reduction) != loss_reduction:
        raise UserError(
            f"the criterion's reduction is {criterion.reduction!r} but loss_reduction is {loss_reduction!r}: the loss "
            "has to be the mean or the sum over samples, and loss_reduction has to say which"
        )
    try:
        batches = len(data_loader)
    except TypeError:
        batches = 0
    if batches == 0 or (data_loader.batch_size is None and data_loader.batch_sampler is None):
        raise UserError(
            "the data loader has no batch size, or no length: privacy accounting needs the share of the data set that "
            "a batch is; use DataLoader(dataset, batch_size=…) over a dataset with a length"
        )


def is_flash(grad_sample_mode: str) -> bool:
    """Return True if flash clipping is requested. Opacus's default, "hooks", counts too: the sums are the same."""
    if grad_sample_mode == FLASH:
        return True
    if grad_sample_mode == "hooks":
        warnings.warn(
            "grad_sample_mode='hooks' uses flash clipping here: the steps are the same, but there is no p.grad_sample. "
            "Leave it out, or use opacus.PrivacyEngine for Opacus's engine",
            stacklevel=3,
        )
        return True
    warnings.warn(
        f"grad_sample_mode={grad_sample_mode!r} is Opacus's engine: leave it out to use flash clipping",
        stacklevel=3,
    )
    return False


def as_number(value: Any) -> Any:
    """Return a number, or a numpy or torch scalar, as a Python float; anything else unchanged."""
    is_scalar = isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0
    return float(value) if is_scalar else value


def validate(module: nn.Module) -> None:
    try:
        require_module(module)
        Ladder(layout_of(module).module).plan()
    except UserError as refusal:
        raise UnsupportedModelError(str(refusal)) from None


def is_valid(module: nn.Module) -> bool:
    try:
        validate(module)
    except UnsupportedModelError:
        return False
    return True


def detach_previous(module: nn.Module, optimizer: Optimizer) -> None:
    """Detach the engine of an earlier make_private of the same model and optimizer; refuse a second optimizer."""
    taps = (instance_method(each) for each in module.modules())
    previous = next((tap.engine for tap in taps if isinstance(tap, EngineTap)), None)
    if previous is None:
        return
    mine = previous.model in (original_of(module), getattr(module, "module", None))
    if not isinstance(optimizer, DPFlashOptimizer) or optimizer.engine is not previous or not mine:
        raise UserError(
            "the model is already private, with an optimizer of its own: give one optimizer several parameter groups, "
            "or pass make_private's own model and optimizer to make them private anew"
        )
    previous.detach()


def warn_of_untrained(engine: FlashEngine, optimizer: DPFlashOptimizer) -> None:
    trained = set(map(id, optimizer.params))
    left = [name for name, p in engine.model.named_parameters() if p.requires_grad and id(p) not in trained]
    if left:
        warnings.warn(
            f"{left[0]}{f' and {len(left) - 1} more parameters' if len(left) > 1 else ''} of the model are not in the "
            "optimizer: they count towards a sample's norm and are not trained; freeze them with requires_grad_(False)",
            stacklevel=3,
        )
