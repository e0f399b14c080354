"""Private training with Lightning: a callback that makes the module, its optimizer and its data private.

The training step returns the mean over samples of each sample's loss, as usual. Checkpoints keep ε.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn
from torch.utils.data import DataLoader

from dpscope.errors import UserError
from dpscope.flash.opacus.privacy_engine import PrivacyEngine
from dpscope.privacy_budget import PrivacyBudget


class PrivateTraining(Callback):
    """Callback that makes a fit private.

    Args:
        max_grad_norm: The bound C on each sample's gradient.
        target_delta: The δ of the ε that is logged, below 1 / number of samples.
        noise_multiplier: The noise of a step divided by C.
        target_epsilon: The ε that all epochs together may spend, instead of `noise_multiplier`.
        module: Name of the module that training_step calls with a batch. Default: the only child that is trained, or
            else the LightningModule itself, whose training_step then has to call `self(x)`.
        **options: Further arguments of `PrivacyEngine.make_private` (`pad_batches`, `memory_budget`, …).

    Raises:
        UserError: Both of `noise_multiplier` and `target_epsilon` are given, or neither.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from dpscope.lightning import PrivateTraining
        >>> private = PrivateTraining(target_epsilon=3.0, target_delta=1e-3, max_grad_norm=1.0)
        >>> Trainer(max_epochs=1, callbacks=[private]).fit(module, loader)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        max_grad_norm: float,
        target_delta: float,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        module: str | None = None,
        **options: Any,
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self.module = module
        self.options = options
        self.privacy_engine = PrivacyEngine()
        self.budget = PrivacyBudget(
            self.privacy_engine.accountant,
            delta=target_delta,
            target_epsilon=target_epsilon,
            noise_multiplier=noise_multiplier,
        )

    def get_epsilon(self, delta: float | None = None) -> float:
        """Return ε of all steps so far at δ = `delta`, by default `target_delta`."""
        if not self.privacy_engine.accountant.history:
            return 0.0
        return float(self.privacy_engine.get_epsilon(self.budget.delta if delta is None else delta))

    # -- what Lightning calls ----------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make everything private. At this point optimizers exist, and no batch was loaded yet."""
        for is_on, why in _REFUSED:
            if is_on(trainer, pl_module):
                raise UserError(f"this fit cannot be private: {why}")
        source = trainer.fit_loop._data_source
        loader = source.dataloader()
        if not isinstance(loader, DataLoader):
            raise UserError(
                f"private training needs one DataLoader to draw samples from, and was given {type(loader).__name__}: "
                "give trainer.fit a DataLoader over the data set"
            )
        dataset: Any = loader.dataset
        self.budget.doubt_delta(len(dataset))
        (optimizer,) = trainer.optimizers
        _, private, private_loader = self.privacy_engine.make_private(
            module=self._spread(trainer, pl_module),
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=self._noise(trainer, len(loader)),
            max_grad_norm=self.max_grad_norm,
            **self.options,
        )
        seeded = self.options.get("noise_generator") is not None
        private.resumes_noise = self.budget.follow(loader.generator) and seeded
        trainer.strategy.optimizers = [private]
        source.instance = private_loader
        self._optimizer = private

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop training when the target ε is reached, also in a run that is resumed for longer."""
        spend = self._optimizer.noise_multiplier, 1 / len(trainer.train_dataloader)
        self.budget.require_left(*spend)
        if (left := self.budget.steps_left(*spend)) is not None:
            loop, last = trainer.fit_loop.epoch_loop, trainer.global_step + left
            loop.max_steps = last if loop.max_steps in (None, -1) else min(loop.max_steps, last)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *unused: Any) -> None:
        if trainer.logger is not None and (trainer.global_step % max(1, trainer.log_every_n_steps)) == 0:
            pl_module.log("epsilon", self.get_epsilon())

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the module back as it was."""
        self._optimizer.engine.detach()

    def state_dict(self) -> dict[str, Any]:
        return self.budget.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.budget.load_state_dict(state_dict)

    # -- how ---------------------------------------------------------------------------------------------------------

    def _spread(self, trainer: Any, pl_module: nn.Module) -> nn.Module:
        """Return the private module, over several processes inside a wrapper that does not reduce gradients.

        Lightning's DDP reduces gradients before they are clipped, so the strategy gets the unwrapped module back.
        """
        root = self._root(pl_module)
        if not _is_ddp(trainer):
            return root
        trainer.strategy.model = pl_module
        return DifferentiallyPrivateDistributedDataParallel(root)  # type: ignore[no-any-return]

    def _root(self, pl_module: nn.Module) -> nn.Module:
        if self.module is not None:
            return pl_module.get_submodule(self.module)
        trained = [child for child in pl_module.children() if any(p.requires_grad for p in child.parameters())]
        owned = any(p.requires_grad for p in pl_module.parameters(recurse=False))
        return trained[0] if len(trained) == 1 and not owned else pl_module

    def _noise(self, trainer: Any, batches: int) -> float:
        epochs, steps = trainer.max_epochs, trainer.max_steps
        if steps is None or steps < 0:
            if self.budget.target is not None and (epochs is None or epochs < 0):
                raise UserError("target_epsilon needs an end of training: give the Trainer max_epochs or max_steps")
            steps = (epochs or 0) * batches
        return self.budget.noise_for(steps, 1 / batches)


_DDP_HOOKS = ("_ddp_comm_state", "_ddp_comm_hook", "_ddp_comm_wrapper")


def _is_ddp(trainer: Any) -> bool:
    return type(trainer.strategy) is DDPStrategy  # DeepSpeed's is a subclass


# (what Lightning would do behind the engine's back, why it is refused and what to do instead)
_REFUSED: tuple[tuple[Callable[[Any, Any], Any], str], ...] = (
    (
        lambda trainer, _: not (isinstance(trainer.strategy, SingleDeviceStrategy) or _is_ddp(trainer)),
        "only one device and strategy='ddp' are supported: use one of the two, or dpscope.accelerate for FSDP2",
    ),
    (
        lambda trainer, _: any(getattr(trainer.strategy, hook, None) is not None for hook in _DDP_HOOKS),
        "communication hooks of DDP see gradients that are not clipped: leave them out",
    ),
    (
        lambda trainer, _: _is_ddp(trainer) and trainer._accelerator_connector.use_distributed_sampler,
        "Lightning would replace the Poisson draws, of which each process has its share already: give the Trainer "
        "use_distributed_sampler=False, and the loader the batch size of all processes together",
    ),
    (
        lambda trainer, _: trainer.gradient_clip_val,
        "gradient_clip_val clips the sum of all samples: leave it out, max_grad_norm bounds each sample",
    ),
    (
        lambda trainer, _: trainer.accumulate_grad_batches != 1,
        "accumulate_grad_batches adds up whole Poisson draws: give the loader the logical batch size, and "
        "pad_batches=SIZE for physical batches",
    ),
    (
        lambda trainer, _: str(trainer.precision).startswith("16"),
        "16-bit precision scales the loss without the engine's knowledge: use precision='bf16-mixed'",
    ),
    (
        lambda _, module: not module.automatic_optimization,
        "manual optimization: call PrivacyEngine.make_private in a loop of your own",
    ),
    (
        lambda trainer, _: len(trainer.optimizers) != 1,
        "a sample is clipped once, over all parameters: return one optimizer from configure_optimizers, with several "
        "groups if needed",
    ),
    (
        lambda trainer, _: trainer.overfit_batches,
        "overfit_batches trains on the same batches again and again, which ε does not describe: leave it out",
    ),
)
