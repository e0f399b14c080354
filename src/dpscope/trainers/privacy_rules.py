"""Layers that cannot be trained privately, and what to use instead."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpscope.errors import UserError
from dpscope.flash.layers.refusals import uses_the_batchs_statistics


class NotPrivateError(UserError):
    """The model mixes samples, so that a single sample has no gradient of its own."""


def require_flat(clipping: str) -> None:
    """Raise UserError if another clipping rule is given to a method that only clips flat."""
    if clipping != "flat":
        raise UserError(f"only flash has clipping rules here: leave out --clipping {clipping}, or the method")


def require_private_trainable(model: nn.Module) -> None:
    """Raise `NotPrivateError` naming every layer that mixes samples and its replacement."""
    mixing = [
        f"{name or 'the model itself'} is {type(module).__name__}, use {_replacement(module)}"
        for name, module in model.named_modules()
        if uses_the_batchs_statistics(module)
    ]
    if mixing:
        raise NotPrivateError(f"cannot be trained privately, layers mix the samples of a batch: {'; '.join(mixing)}")


def _replacement(module: nn.Module) -> str:
    if isinstance(module, _BatchNorm):
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return "eval() mode, for it is frozen"
        groups = next(g for g in (32, 16, 8, 4, 2, 1) if module.num_features % g == 0)
        return f"nn.GroupNorm({groups}, {module.num_features})"
    return "track_running_stats=False"
