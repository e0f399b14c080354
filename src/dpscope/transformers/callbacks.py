"""Work of a private trainer between the steps of the Trainer's own loop, and its check of the first step.

The check: all trained parameters move, and nothing else does. Noise moves every trained parameter, so a run can seem to
train while no gradient reaches some of them: an adapter that is not active, a head that the loss does not use. And a
frozen weight that moves has no privacy at all. (Where no gradient reaches anything, the engine itself refuses the
step.)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from dpscope.errors import UserError
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer


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
NAMED = 3


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
        if self._before is None:
            return False
        if samples == 0:  # an empty draw: a step of noise alone
            return False
        after = self._look()
        moved = {name for name, elements in self._before.items() if not torch.equal(elements, after[name])}
        trained = {name for name, each in self.parameters.items() if each.requires_grad}
        if strays := moved - trained:
            raise UserError(
                f"{_listed(strays)} changed in the first step but is frozen, and so has no privacy: something else "
                "than the private optimizer writes to it (a callback, a second optimizer)"
            )
        unreached = {name for name in trained if self.parameters[name] not in self.reached}
        if unreached:
            warnings.warn(
                f"no gradient reached {_listed(unreached)} in the first step: noise alone moves what the loss does not "
                "depend on; freeze it with requires_grad_(False), or set the adapter active",
                stacklevel=2,
            )
        if self.optimizer.noise_multiplier > 0 and (still := trained - moved):
            raise UserError(
                f"{_listed(still)} should be trained and did not change in the first step: give it to the optimizer, "
                "or freeze it with requires_grad_(False)"
            )
        return True

    def _look(self) -> dict[str, Tensor]:
        return {name: _some_elements(each) for name, each in self.parameters.items() if each.numel()}


@torch.no_grad()
def _some_elements(parameter: nn.Parameter) -> Tensor:
    local = getattr(parameter, "_local_tensor", parameter).detach().reshape(-1)
    return local[:: max(1, local.numel() // WATCHED)][:WATCHED].clone()


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - NAMED} more" if len(ordered) > NAMED else ""
    return ", ".join(ordered[:NAMED]) + more
