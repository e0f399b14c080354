"""Modules that cannot be trained privately. Trained ones are refused by name; frozen ones run unchanged."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from dpscope.errors import UserError
from dpscope.flash.taps.taps import EngineTap

_EMBEDDING_OPTIONS = ("scale_grad_by_freq", "sparse", "max_norm")

_REFUSED: tuple[tuple[type[Any], Callable[[Any], bool], str], ...] = (
    (
        _BatchNorm,
        lambda module: True,
        "mixes the samples of a batch, so no sample has a gradient of its own; use nn.GroupNorm "
        "(opacus.validators.ModuleValidator.fix(model) replaces it)",
    ),
    (
        _InstanceNorm,
        lambda module: bool(module.track_running_stats),
        "keeps running statistics of the batch; make it with track_running_stats=False",
    ),
    *(
        (
            cls,
            lambda module, option=option: getattr(module, option) not in (None, False),
            f"is not supported with {option}=...; make it without {option}",
        )
        for cls, option in product((nn.Embedding, nn.EmbeddingBag), _EMBEDDING_OPTIONS)
    ),
    (
        torch.jit.ScriptModule,
        lambda module: True,
        "is compiled by torch.jit, and what it does inside cannot be seen; use the module it was made of",
    ),
    (
        LazyModuleMixin,
        lambda module: module.has_uninitialized_params(),
        "has parameters without a shape; run one batch through the model first",
    ),
)

_BATCH_STATISTICS = (
    "is frozen, but in training mode: it takes the statistics of the batch, which mixes samples, and remembers them "
    "without noise; call eval() on it (after each model.train())"
)


def refusal_of(module: nn.Module) -> str | None:
    """Return why the module cannot be trained; None if it can."""
    return next((why for cls, applies, why in _REFUSED if isinstance(module, cls) and applies(module)), None)


def uses_the_batchs_statistics(module: nn.Module) -> bool:
    """Return whether it normalises over the batch in training: it is not both frozen and in eval() mode."""
    if not (isinstance(module, _BatchNorm) or (isinstance(module, _InstanceNorm) and module.track_running_stats)):
        return False
    return module.training or any(parameter.requires_grad for parameter in module.parameters())


def refuse_trained(name: str, module: nn.Module) -> None:
    why = refusal_of(module)
    if why is not None and any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError(f"{_called(name, module)} {why}")


class RefusedTap(EngineTap):
    """The forward of a module that cannot be trained. It runs unchanged while it is frozen, which may change."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            refuse_trained(self.name, self.module)
            if uses_the_batchs_statistics(self.module):
                raise UserError(f"{_called(self.name, self.module)} {_BATCH_STATISTICS}")
        return self.original(*args, **kwargs)


def _called(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"
