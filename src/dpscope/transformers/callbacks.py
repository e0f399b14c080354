"""Work of a private trainer between the steps of the Trainer's own loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import TrainerCallback


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
    """Watches the first step, notes norms, and stops when the target ε is reached."""

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
