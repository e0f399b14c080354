"""Logical batches of private methods: several physical batches, clipped and summed one by one, then one noisy step."""

from __future__ import annotations

from typing import Protocol

from opacus.optimizers import DPOptimizer


class AccumulatingTrainer(Protocol):
    optimizer: DPOptimizer

    def update(self) -> None: ...


def keep_clipped_sums(trainer: AccumulatingTrainer) -> None:
    """Clip and sum the physical batch without a step, as Opacus's `BatchMemoryManager` makes its loops do."""
    trainer.optimizer.signal_skip_step(do_skip=True)
    trainer.update()
    trainer.optimizer.zero_grad(set_to_none=True)
