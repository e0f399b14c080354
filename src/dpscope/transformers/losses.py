"""The loss of each sample: a mean over its own tokens.

Models and the Trainer average over the tokens of a whole batch, so that one sample's length scales the gradients of
all others: clipping then bounds nothing. Here row b of the logits and of the labels gives losses[b], and nothing else.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.errors import UserError

IGNORED = -100
_SHIFTING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForImageTextToText")


def task_model(model: nn.Module) -> nn.Module:
    """Return the task model inside the wrappers of DDP, torch.compile and PEFT."""
    for name in ("module", "_orig_mod"):
        model = getattr(model, name, model)
    base = getattr(model, "get_base_model", None)
    found: nn.Module = model if base is None else base()
    return found


@cache
def takes_cache(kind: Any) -> bool:
    """Return whether a class of models may return keys and values for generation, which training does not use."""
    return "use_cache" in inspect.signature(kind.forward).parameters


def sample_losses(model: nn.Module, outputs: Any, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Return one loss for each sample, (B,): what the model's own loss would be for a batch of that sample alone."""
    logits = outputs.get("logits") if isinstance(outputs, dict) else outputs[0]
    inner = task_model(model)
    if not isinstance(logits, Tensor):
        _refuse(inner, "it gives no logits, or several")
    if logits.dim() == 3 and labels.dim() == 2 and not labels.is_floating_point():
        return _token_losses(logits, labels, shifts=_shifts(inner), smoothing=smoothing)
    if logits.dim() != 2:
        _refuse(inner, f"its logits are of shape {tuple(logits.shape)} and its labels of {tuple(labels.shape)}")
    return _class_losses(inner, logits, labels, smoothing)


def _shifts(model: nn.Module) -> bool:
    """Return whether the logits of a position predict the next token."""
    config = getattr(model, "config", None)
    return type(model).__name__.endswith(_SHIFTING) and not getattr(config, "is_encoder_decoder", False)


def _token_losses(logits: Tensor, labels: Tensor, *, shifts: bool, smoothing: float) -> Tensor:
    """Return the token losses; logits: (B, T, V), labels: (B, T). Virtual tokens of prompt tuning have no labels."""
    labels = F.pad(labels, (logits.shape[1] - labels.shape[1], 0), value=IGNORED)
    if shifts:
        labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    each = F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=smoothing,
    )
    counted = (labels != IGNORED).sum(1).clamp(min=1)
    return each.view(labels.shape).sum(1) / counted


def _class_losses(model: nn.Module, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Return the class losses; logits: (B, K). As in transformers: by config.problem_type or dtype."""
    kind = getattr(getattr(model, "config", None), "problem_type", None)
    if kind == "regression" or (
        kind is None and (logits.shape[1] == 1 or (labels.dim() == 1 and labels.is_floating_point()))
    ):
        return (logits.float() - labels.view(logits.shape).float()).square().mean(1)
    if kind == "multi_label_classification" or (kind is None and labels.dim() == 2 and labels.is_floating_point()):
        return F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none").mean(1)
    if labels.dim() != 1:
        _refuse(model, f"its labels are of shape {tuple(labels.shape)} for {logits.shape[1]} classes")
    return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=smoothing)


def check_losses(losses: Any, rows: int, source: str) -> Tensor:
    """Return `losses` if it is one number for each sample; raise UserError otherwise."""
    if not isinstance(losses, torch.Tensor) or losses.shape != (rows,):
        shape = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise UserError(
            f"{source} has to give one loss for each sample, a tensor of shape ({rows},), and gave {shape}: use "
            "reduction='none' and average over each sample's own tokens"
        )
    return losses


def _refuse(model: nn.Module, why: str) -> NoReturn:
    raise UserError(
        f"the loss of each sample of {type(model).__name__} is not known ({why}): override sample_losses(model, "
        "inputs), or give compute_loss_func, and return one loss for each sample"
    )
