"""Steps of a private trainer: the loss of each sample, and work between the steps of the Trainer's own loop.

Models and the Trainer average over the tokens of a whole batch, so that one sample's length scales the gradients of
all others: clipping then bounds nothing. Here row b of the logits and of the labels gives losses[b], and nothing else.

The first step is checked: all trained parameters move, and nothing else does. Noise moves every trained parameter, so a
run can seem to train while no gradient reaches some of them: an adapter that is not active, a head that the loss does
not use. And a frozen weight that moves has no privacy at all. (Where no gradient reaches anything, the engine itself
refuses the step.)
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import TrainerCallback

from dpscope.errors import UserError
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
from dpscope.units import list_names

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
        encodes = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
        shifts = type(inner).__name__.endswith(_SHIFTING) and not encodes  # a position's logits predict the next token
        return _token_losses(logits, labels, shifts=shifts, smoothing=smoothing)
    if logits.dim() != 2:
        _refuse(inner, f"its logits are of shape {tuple(logits.shape)} and its labels of {tuple(labels.shape)}")
    return _class_losses(inner, logits, labels, smoothing)


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


@contextmanager
def noting_models(accelerator: Any) -> Iterator[list[nn.Module]]:
    """Record the models that `accelerator.prepare` returns inside: wrapped, spread and compiled."""
    found: list[nn.Module] = []
    prepare = accelerator.prepare

    def noting(*objects: Any, **options: Any) -> Any:
        prepared = prepare(*objects, **options)
        each = prepared if isinstance(prepared, tuple) else (prepared,)
        found.extend(one for one in each if isinstance(one, nn.Module))
        return prepared

    accelerator.prepare = noting
    try:
        yield found
    finally:
        del accelerator.prepare


class PrivacyCallback(TrainerCallback):
    """Callback that checks the first step, records norms, and stops when the target ε is reached."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._left: int | None = None

    def on_train_begin(self, *unused: Any, **also: Any) -> None:
        self._left = self.trainer.steps_left()

    def on_pre_optimizer_step(self, *unused: Any, **also: Any) -> None:
        if self.trainer._first_step is not None:
            self.trainer._first_step.begin()

    def on_optimizer_step(self, *unused: Any, **also: Any) -> None:
        trainer = self.trainer
        trainer._note_norms(trainer._optimizer)
        samples = sum(len(losses) for losses in trainer._losses)
        if trainer._first_step is not None and trainer._first_step.end(samples):
            trainer._first_step = None

    def on_step_end(self, args: Any, state: Any, control: Any, **also: Any) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                control.should_training_stop = True


WATCHED = 16  # elements of each parameter: all of a trained one receive noise, so any of them tells


class FirstStep:
    """Check of a private model's parameters before and after the first step with a learning rate."""

    def __init__(self, optimizer: DPFlashOptimizer) -> None:
        self.optimizer = optimizer
        self.parameters = dict(optimizer.engine.model.named_parameters())
        self.reached: set[nn.Parameter] = set()
        self._before: dict[str, Tensor] | None = None

    def see_backward(self) -> None:
        """Record which parameters the backward passes have reached. Call it before the step."""
        self.reached |= {slot.parameter for slot, _ in self.optimizer.engine.contributions()}

    def begin(self) -> None:
        """Copy a few elements of every parameter. Call it before the update."""
        moving = any(float(group["lr"]) > 0 for group in self.optimizer.param_groups)
        self._before = self._look() if moving else None

    def end(self, samples: int) -> bool:
        """Raise or warn if something is wrong after the update. Return whether there was an update to check."""
        if self._before is None or samples == 0:  # an empty draw is a step of noise alone
            return False
        after = self._look()
        moved = {name for name, elements in self._before.items() if not torch.equal(elements, after[name])}
        trained = {name for name, each in self.parameters.items() if each.requires_grad}
        if strays := moved - trained:
            raise UserError(
                f"{list_names(sorted(strays))} changed in the first step but is frozen, and so has no privacy: "
                "something else than the private optimizer writes to it (a callback, a second optimizer)"
            )
        unreached = {name for name in trained if self.parameters[name] not in self.reached}
        if unreached:
            warnings.warn(
                f"no gradient reached {list_names(sorted(unreached))} in the first step: noise alone moves what the "
                "loss does not depend on; freeze it with requires_grad_(False), or set the adapter active",
                stacklevel=2,
            )
        if self.optimizer.noise_multiplier > 0 and (still := trained - moved):
            raise UserError(
                f"{list_names(sorted(still))} should be trained and did not change in the first step: give it to the "
                "optimizer, or freeze it with requires_grad_(False)"
            )
        return True

    @torch.no_grad()
    def _look(self) -> dict[str, Tensor]:
        local = {
            name: getattr(each, "_local_tensor", each).detach().reshape(-1)
            for name, each in self.parameters.items()
            if each.numel()
        }
        return {name: own[:: max(1, own.numel() // WATCHED)][:WATCHED].clone() for name, own in local.items()}
