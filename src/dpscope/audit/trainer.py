"""A trainer as a loop, so that the methods dpscope compares pass the same tests as any training loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from dpscope.audit.loop import Loop, MakeLoop
from dpscope.batches import LossFn, split_batch
from dpscope.errors import UserError
from dpscope.trainers.base import TrainerBase
from dpscope.vocabulary.settings import EAGER, TrainerSettings
from dpscope.workloads.workload import Batch

# With a step this large the parameters' own size is lost in the rounding, and not the other way round. A power of two,
# so that nothing else is.
HUGE_LEARNING_RATE = 2.0**40
DATASET_BATCHES = 100  # batches in the data set that the accountant is told of


@dataclass(frozen=True)
class StepSettings:
    """Settings of the steps that a method is tested in."""

    accumulate: int = 1  # physical batches of a step
    checkpoint_blocks: bool = False
    compile: str = EAGER
    clipping: str = "flat"
    cuda_graph: bool = False

    def divide(self, samples: int) -> dict[str, Any]:
        """Return the settings of a trainer whose steps have this many samples."""
        if samples % self.accumulate:
            raise UserError(
                f"a batch of {samples} samples cannot be {self.accumulate} batches of one size: give a batch size that "
                f"is a multiple of {self.accumulate}"
            )
        return {"batch_size": samples // self.accumulate, **asdict(self)}


def loop_maker(
    trainer_class: type[TrainerBase],
    make_model: Callable[[], nn.Module],
    loss: LossFn,
    batch_size: int,
    how: StepSettings,
) -> MakeLoop:
    def make_loop(*, noise_multiplier: float, max_grad_norm: float, seed: int) -> Loop:
        settings = TrainerSettings(
            **how.divide(batch_size),
            optimizer="sgd",
            learning_rate=HUGE_LEARNING_RATE,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            seed=seed,
        )
        model = make_model()
        trainer = trainer_class(model, loss, settings)
        rate = 1 / DATASET_BATCHES

        def step(batch: Batch) -> None:
            trainer.train_step(*split_batch(batch, how.accumulate))

        return Loop(
            model=trained_model(trainer, model),
            step=step,
            scale=HUGE_LEARNING_RATE / batch_size,
            accountant=_account(trainer, rate),
            sample_rate=rate,
            save=lambda: copy.deepcopy(trainer.optimizer.state_dict()),
            resume=trainer.optimizer.load_state_dict,
        )

    return make_loop


def trained_model(trainer: TrainerBase, model: nn.Module) -> nn.Module:
    """Return the module whose parameters move. A trainer may wrap the model it was given, or train a copy."""
    own = {id(p) for p in model.parameters()}
    return model if own & {id(p) for p in trainer.model.parameters()} else trainer.model


def _account(trainer: TrainerBase, sample_rate: float) -> Any:
    """Return Opacus's accountant, attached to an optimizer that has step hooks; None if it has none."""
    attach = getattr(trainer.optimizer, "attach_step_hook", None)
    if attach is None:
        return None
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    attach(accountant.get_optimizer_hook_fn(sample_rate=sample_rate))
    return accountant
