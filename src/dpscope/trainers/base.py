"""Base of all trainers: a model, a loss, an optimizer, and a step in named phases; and ordinary training.

Ordinary training is the denominator of every comparison. Layers that cannot be trained privately are refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from dpscope.batches import LossFn, tensors_of
from dpscope.errors import UserError
from dpscope.places import load_at
from dpscope.results.schema import Note
from dpscope.trainers.modes import OrdinaryGraph, checkpoint_blocks, compile_model, is_sharded, spread
from dpscope.vocabulary import phases
from dpscope.vocabulary.methods import Method
from dpscope.vocabulary.phases import moment, phase
from dpscope.vocabulary.settings import EAGER, OPTIMIZERS, TrainerSettings
from dpscope.workloads.workload import Batch

if TYPE_CHECKING:
    from dpscope.instruments.memory import ComponentRule, Holding


class NotPrivateError(UserError):
    """The model mixes samples, so that a single sample has no gradient of its own."""


def require_flat(clipping: str) -> None:
    """Raise UserError if another clipping rule is given to a method that only clips flat."""
    if clipping != "flat":
        raise UserError(f"only flash has clipping rules here: leave out --clipping {clipping}, or the method")


def require_private_trainable(model: nn.Module) -> None:
    """Raise `NotPrivateError` naming every layer that mixes samples and its replacement."""
    from dpscope.flash.layers.refusals import uses_the_batchs_statistics  # which ordinary training does not need

    mixing = []
    for name, module in model.named_modules():
        if not uses_the_batchs_statistics(module):
            continue
        instead = "track_running_stats=False"
        if isinstance(module, _BatchNorm):
            groups = next(g for g in (32, 16, 8, 4, 2, 1) if module.num_features % g == 0)
            trained = any(parameter.requires_grad for parameter in module.parameters())
            instead = f"nn.GroupNorm({groups}, {module.num_features})" if trained else "eval() mode, for it is frozen"
        mixing.append(f"{name or 'the model itself'} is {type(module).__name__}, use {instead}")
    if mixing:
        raise NotPrivateError(f"cannot be trained privately, layers mix the samples of a batch: {'; '.join(mixing)}")


AUTOCAST = {"bf16": torch.bfloat16}  # the other formats are those of the parameters


class TrainerBase:
    """Base of trainers: it owns a model and a method, and does `train_step(batch)`.

    A subclass defines how model and optimizer are prepared, and the backward pass and the update, where they are not
    those of ordinary training. For the memory instrument it may also declare what it keeps (`holdings`,
    `memory_rules`). After a step `.grad` holds what the optimizer applied, unless the update consumes it piece by piece
    (flash).
    """

    memory_rules: ClassVar[tuple[ComponentRule, ...]] = ()

    def __init__(self, model: nn.Module, loss: LossFn, settings: TrainerSettings) -> None:
        require_trainable(model)
        self.loss = loss
        self.settings = settings
        self.device = next(model.parameters()).device
        allow_tf32(settings.dtype == "tf32")
        self.plain_model = model
        moment(phases.MODEL_LOADED)
        compiled = settings.compile != EAGER
        self.checkpoints = checkpoint_blocks(model, compiled=compiled) if settings.checkpoint_blocks else None
        self.require_model(model)
        prepared = self.spread(model) if settings.world_size > 1 else model
        self.model = self.prepare_model(prepared if settings.compile == EAGER else self.compile(prepared))
        moment(phases.MODEL_WRAPPED)
        self.optimizer = self.prepare_optimizer(self._plain_optimizer(model))
        moment(phases.OPTIMIZER_CREATED)
        self._take = self.make_graphed() if settings.cuda_graph else self.take_step

    def train_step(self, *batches: Batch) -> Tensor:
        """Take one step on one batch, or on several that form a logical batch; return the detached mean loss."""
        return self._take(*batches)

    def take_step(self, *batches: Batch) -> Tensor:
        """Do the same without a CUDA graph."""
        self.optimizer.zero_grad(set_to_none=True)
        first, *more = batches
        loss = self._differentiate(first)
        for batch in more:
            self.accumulate()
            loss = loss + self._differentiate(batch)
        self.update()
        return loss / len(batches) if more else loss

    def _differentiate(self, batch: Batch) -> Tensor:
        """Run the forward and backward pass of one batch; return its mean loss."""
        losses = self.losses_of(batch)
        self.backward(losses)
        return losses.detach().mean()

    def losses_of(self, batch: Batch) -> Tensor:
        """Run the forward pass of one batch; return one loss per sample, (B,)."""
        with phase(phases.FORWARD), self._autocast():
            losses = self.loss(self.model, batch)
        if self.checkpoints is not None:
            self.checkpoints.require_runs()
        require_loss_per_sample(losses)
        return losses

    def require_model(self, model: nn.Module) -> None:
        """Raise `UserError` for a model that this method cannot train."""

    def spread(self, model: nn.Module) -> nn.Module:
        """Return the model over `settings.world_size` processes. Its parameters are replaced in place, if at all."""
        raise UserError(
            f"{type(self).__name__} trains in one process: over several, compare standard and flash "
            "(--methods standard,flash)"
        )

    def compile(self, model: nn.Module) -> nn.Module:
        """Return the model as torch.compile runs it. A method that can train it returns `compile_model(…)`."""
        raise UserError(
            f"{type(self).__name__} does not say that it can train a compiled model (its method compile()): compare "
            f"--methods standard,flash, or measure it with --compile {EAGER}"
        )

    def make_graphed(self) -> Callable[..., Tensor]:
        """Return `take_step` as a function that replays a CUDA graph, for a method that can."""
        raise UserError(
            f"{type(self).__name__} does not say that its step can be a CUDA graph (its method make_graphed()): "
            "compare --methods standard,flash, or measure it without --cuda-graph"
        )

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Return the model as this method trains it."""
        return model

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer as this method uses it."""
        return optimizer

    def backward(self, losses: Tensor) -> None:
        """Compute gradients from one loss per sample, (B,)."""
        with phase(phases.BACKWARD):
            self.run_backward(losses)

    def run_backward(self, losses: Tensor) -> None:
        """Do the work of `backward`, inside its phase."""
        losses.mean().backward()  # type: ignore[no-untyped-call]

    def update(self) -> None:
        """Take one optimizer step from those gradients."""
        with phase(phases.OPTIMIZER):
            self.optimizer.step()

    def accumulate(self) -> None:
        """Keep the gradients for the step, because another batch of the same logical batch follows.

        An optimizer with Opacus's `signal_skip_step` clips and sums the batch without a step, as `BatchMemoryManager`
        makes loops do.
        """
        skip = getattr(self.optimizer, "signal_skip_step", None)
        if skip is None:
            raise UserError(
                f"{type(self).__name__} takes a step after every batch: override its method accumulate(), or leave out "
                "--accumulate"
            )
        skip(do_skip=True)
        self.update()
        self.optimizer.zero_grad(set_to_none=True)

    def holdings(self) -> Iterator[Holding]:
        """Yield what is held now, as (component, path of the module it belongs to, tensor)."""
        from dpscope.instruments.memory import model_holdings

        yield from model_holdings(self.plain_model, self.optimizer)

    def begin_measuring(self) -> None:
        """Skip, from now on, work that is not part of every step."""

    def notes(self) -> list[Note]:
        """Return notes for readers of this row's figures on how the method trains the model."""
        return []

    def noise_generator(self) -> torch.Generator:
        return torch.Generator(device=self.device).manual_seed(self.settings.seed)

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = None if is_sharded(self.settings) else AUTOCAST.get(self.settings.dtype)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def _plain_optimizer(self, model: nn.Module) -> Optimizer:
        parameters = [p for p in model.parameters() if p.requires_grad]
        make: Callable[..., Optimizer] = getattr(torch.optim, OPTIMIZERS[self.settings.optimizer])
        options = fastest_options(make, self.device.type)
        return make(parameters, lr=self.settings.learning_rate, **options, **self.optimizer_options(make))

    def optimizer_options(self, optimizer: Callable[..., Optimizer]) -> dict[str, bool]:
        """Return further options of the plain optimizer."""
        return {}


def fastest_options(optimizer: Callable[..., Optimizer], device: str) -> dict[str, bool]:
    """Return options for the fused CUDA implementation, which ordinary training would use: a fair baseline."""
    return {"fused": True} if device == "cuda" and "fused" in signature(optimizer).parameters else {}


def allow_tf32(allowed: bool) -> None:
    """Set TF32 for matrix products and convolutions, which use it unless told not to: fp32 means fp32."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def require_trainable(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"the workload's model must be an nn.Module, but it is {type(model).__name__} {model!r:.60}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("the model has no parameter that requires a gradient: there is nothing to train")


def require_loss_per_sample(losses: object) -> None:
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        got = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
        raise UserError(
            f"the workload's loss must return one loss per sample, shape (batch,), but it returned {got}: "
            "use reduction='none' and average over everything but the first dimension"
        )
    if not losses.requires_grad:
        raise UserError(
            "no parameter receives a gradient: the loss is detached from the model (look for .detach(), .item(), "
            "torch.no_grad() and whole numbers)"
        )


def require_batch_of(batch: Batch, samples: int, *, accumulate: int = 1) -> None:
    """Raise `UserError` unless the batch, which may be `accumulate` batches in one, has the expected samples."""
    tensors = [tensor for tensor in tensors_of(batch) if tensor.dim()]
    if not tensors:
        raise UserError("the workload's batch holds no tensor whose first dimension is the sample")
    sizes = {len(tensor) for tensor in tensors}
    if samples * accumulate not in sizes:
        found = ", ".join(map(str, sorted(sizes)))
        together = f"--batch-size {samples} and --accumulate {accumulate} say {samples * accumulate}"
        said = together if accumulate > 1 else f"--batch-size says {samples}"
        raise UserError(
            f"the workload's batch has {found} samples where {said}: let the function take batch_size and use it, or "
            "give the batch size that it makes"
        )


def load_trainer(method: Method) -> type[TrainerBase]:
    trainer: type[TrainerBase] = load_at(method.trainer)
    return trainer


class StandardTrainer(TrainerBase):
    """One backward pass for each batch, one optimizer step, no privacy."""

    def spread(self, model: nn.Module) -> nn.Module:
        return spread(model, self.settings)

    def compile(self, model: nn.Module) -> nn.Module:
        return compile_model(model, self.settings)

    def make_graphed(self) -> Callable[..., Tensor]:
        """Return ordinary steps as a graph. A subclass has to say what it does: a graph might replay its noise."""
        if type(self) is not StandardTrainer:
            return super().make_graphed()
        return OrdinaryGraph(self.take_step, self.optimizer)

    def optimizer_options(self, optimizer: Callable[..., Optimizer]) -> dict[str, bool]:
        captured = self.settings.cuda_graph and type(self) is StandardTrainer
        return {"capturable": True} if captured and "capturable" in signature(optimizer).parameters else {}

    def run_backward(self, losses: Tensor) -> None:
        loss = losses.mean()
        if self.settings.accumulate > 1:
            loss = loss / self.settings.accumulate
        loss.backward()  # type: ignore[no-untyped-call]

    def accumulate(self) -> None:
        """Let the next backward pass add to `.grad`. Subclasses override this if they accumulate differently."""
        if type(self) is not StandardTrainer:
            super().accumulate()
