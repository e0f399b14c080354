"""Adapters on any model, through Hugging Face's peft: they are trained, the model is frozen."""

from __future__ import annotations

import warnings

from torch import nn

from dpscope.errors import UserError
from dpscope.packages import install_command
from dpscope.workloads.configs import LoraSettings

ALL_LINEAR = "all-linear"


def adapt(model: nn.Module, lora: LoraSettings) -> nn.Module:
    """Return the model with adapters on the modules that `lora.target` names.

    Both factors are drawn at random. peft's own start, B = 0, would give A no gradient in the first step, and a step
    that is compared or checked should be one in which every adapter moves.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise UserError(f"--lora needs Hugging Face's peft: {install_command('peft')}") from None
    if lora.target != (ALL_LINEAR,):
        _require_targets(model, lora.target)
    settings = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=ALL_LINEAR if lora.target == (ALL_LINEAR,) else list(lora.target),
        lora_dropout=0.0,
        init_lora_weights=False,
    )
    try:
        with warnings.catch_warnings():  # peft turns the matrices of GPT-2's Conv1D by itself, and says so
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
            adapted: nn.Module = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise UserError(f"--lora: peft refuses this model: {str(error).splitlines()[0]}") from None
    return adapted


def _require_targets(model: nn.Module, targets: tuple[str, ...]) -> None:
    names = [name for name, _ in model.named_modules()]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise UserError(f"--lora target={target}: the model has no such module; it has {_adaptable(model)}")


def _adaptable(model: nn.Module) -> str:
    """Return the last name parts of modules that hold a matrix, each once: the names that people give as targets."""
    found = dict.fromkeys(
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if name and (weight := module._parameters.get("weight")) is not None and weight.dim() > 1
    )
    words = [name for name in found if not name.isdigit()] or list(found)
    return ", ".join(words[:12]) + (", …" if len(words) > 12 else "")
