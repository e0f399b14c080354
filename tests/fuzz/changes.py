"""What a user does between the steps of a run: options, modes, classes and gradients change, none of which mixes."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

Change = Callable[[nn.Module, random.Random], str]  # changes a model, and says what it did; "" if there is nothing
During = Callable[[], AbstractContextManager[Any]]


def _pick(model: nn.Module, rng: random.Random, *classes: type[nn.Module]) -> Any:
    found = [module for module in model.modules() if isinstance(module, classes)]
    return rng.choice(found) if found else None


def _option(*classes: type[nn.Module], **values: Callable[[Any, random.Random], Any]) -> Change:
    def change(model: nn.Module, rng: random.Random) -> str:
        layer = _pick(model, rng, *classes)
        if layer is None:
            return ""
        for name, value in values.items():
            setattr(layer, name, value(layer, rng))
        return f"{type(layer).__name__}.{next(iter(values))}"

    return change


def _frozen(model: nn.Module, rng: random.Random) -> str:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if len(parameters) < 2:
        return ""
    rng.choice(parameters).requires_grad_(False)
    return "a parameter frozen"


def _frozen_module(model: nn.Module, rng: random.Random) -> str:
    module = rng.choice(list(model.modules())[1:])
    rest = {id(p) for p in model.parameters() if p.requires_grad} - {id(p) for p in module.parameters()}
    if not rest:
        return ""
    module.requires_grad_(False)
    return f"{type(module).__name__} frozen"


def _written(model: nn.Module, rng: random.Random) -> str:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9).add_(0.01)
    return "parameters written"


def _mode(model: nn.Module, rng: random.Random) -> str:
    module = rng.choice(list(model.modules()))
    if any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules()):
        return ""
    module.train(not module.training)
    return f"{type(module).__name__}.train({module.training})"


class _Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sin()


def _class_swapped(model: nn.Module, rng: random.Random) -> str:
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    if not layers:
        return ""
    rng.choice(layers).__class__ = _Doubled
    return "Linear.__class__"


def _hook_added(model: nn.Module, rng: random.Random) -> str:
    layer = _pick(model, rng, nn.Linear, nn.LayerNorm, nn.Conv1d, nn.Embedding)
    if layer is None:
        return ""
    layer.register_forward_hook(lambda module, args, output: output.tanh())
    return f"a hook on {type(layer).__name__}"


def _method_added(model: nn.Module, rng: random.Random) -> str:
    layer = _pick(model, rng, nn.Conv1d, nn.Conv2d)
    if layer is None:
        return ""
    own = layer._conv_forward
    layer._conv_forward = types.MethodType(lambda self, x, weight, bias: own(x, weight.tanh(), bias), layer)
    return "_conv_forward of an instance"


def _replaced(model: nn.Module, rng: random.Random) -> str:
    layer = _pick(model, rng, nn.Linear, nn.LayerNorm)
    if layer is None or layer._parameters.get("weight") is None:
        return ""
    layer.weight = nn.Parameter(layer.weight.detach().clone() * 1.1)
    return f"{type(layer).__name__}.weight replaced"


def _bias_removed(model: nn.Module, rng: random.Random) -> str:
    layers = [m for m in model.modules() if type(m) in (nn.Linear, nn.Conv1d) and m._parameters.get("bias") is not None]
    if not layers:
        return ""
    rng.choice(layers).bias = None
    return "a bias removed"


def _divisor_of_channels(layer: Any, rng: random.Random) -> int:
    return rng.choice([n for n in range(1, layer.num_channels + 1) if layer.num_channels % n == 0])


CHANGES: dict[str, Change] = {
    "eps": _option(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm1d, eps=lambda layer, rng: 0.7),
    "num_groups": _option(nn.GroupNorm, num_groups=_divisor_of_channels),
    "dilation": _option(nn.Conv1d, dilation=lambda layer, rng: (2,), padding=lambda layer, rng: (2,)),
    "padding_mode": _option(nn.Conv1d, padding_mode=lambda layer, rng: "circular"),
    "padding_idx": _option(nn.Embedding, padding_idx=lambda layer, rng: rng.choice([None, 0, 2])),
    "max_norm": _option(nn.Embedding, max_norm=lambda layer, rng: 0.5),
    "scale_grad_by_freq": _option(nn.Embedding, scale_grad_by_freq=lambda layer, rng: True),
    "p": _option(nn.Dropout, p=lambda layer, rng: 1.0),
    "frozen": _frozen,
    "frozen module": _frozen_module,
    "written": _written,
    "mode": _mode,
    "class": _class_swapped,
    "hook": _hook_added,
    "method": _method_added,
    "replaced": _replaced,
    "bias": _bias_removed,
}


# -- while a step runs


class _Squashing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.tanh() if func in (F.linear, F.layer_norm) else found


def _function(name: str) -> During:
    own = getattr(F, name)
    return lambda: mock.patch.object(F, name, lambda *args, **kwargs: own(*args, **kwargs).sin())


def _method(cls: type[nn.Module], name: str) -> During:
    own = getattr(cls, name)
    return lambda: mock.patch.object(cls, name, lambda self, *args: own(self, *args) * 1.3)


DURING: dict[str, During] = {
    "nothing": nullcontext,
    "F.linear patched": _function("linear"),
    "F.layer_norm patched": _function("layer_norm"),
    "F.conv1d patched": _function("conv1d"),
    "Linear.forward patched": _method(nn.Linear, "forward"),
    "LayerNorm.forward patched": _method(nn.LayerNorm, "forward"),
    "Conv1d._conv_forward patched": _method(nn.Conv1d, "_conv_forward"),
    "Embedding.forward patched": _method(nn.Embedding, "forward"),
    "a torch function mode": _Squashing,
}

# -- what a loop does to gradients between micro-batches; whether it also drops the micro-batches before


def _scale(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(100)


def _drop(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _set(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)


BETWEEN: dict[str, tuple[Callable[[nn.Module], Any], bool]] = {
    "nothing": (lambda model: None, False),
    "clip_grad_norm_": (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3), False),
    "clip_grad_value_": (lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3), False),
    "grad.mul_(100)": (_scale, False),
    "grad = None": (_drop, False),
    "grad set": (_set, False),
    "zero_grad()": (lambda model: model.zero_grad(), True),
}

# What is refused, or fails in torch, so that the run ends with it.
ENDING = ("max_norm", "scale_grad_by_freq", "replaced", "grad set")
