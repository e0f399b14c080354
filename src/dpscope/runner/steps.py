"""The steps of a measurement: training steps whose losses are kept, and checked while nothing is timed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpscope.batches import tensors_of
from dpscope.errors import MeasurementFailed
from dpscope.flash.torch_side.shards import local
from dpscope.instruments.peaks import cpu_peak, cuda_peak
from dpscope.instruments.timing import Progress, no_progress
from dpscope.results.payloads.memory import MemoryPayload
from dpscope.results.schema import Note
from dpscope.runner.assembly import assemble
from dpscope.runner.compilation import Compilation
from dpscope.runner.spec import RunSpec
from dpscope.trainers.base import TrainerBase
from dpscope.trainers.graphed import EAGER_STEPS
from dpscope.vocabulary.settings import EAGER

STEPS_TO_CAPTURE = EAGER_STEPS + 1

BEFORE_ANY_UPDATE = (
    "before any update: look for a division by zero, a logarithm of zero or an overflow in the model, the data and the "
    "loss function"
)


class TrainingSteps:
    """Training step to call. Reading a loss waits for the GPU, so losses are kept until `require_finite_losses`."""

    def __init__(self, spec: RunSpec, *, warmup: int | None = None) -> None:
        self.trainer, self.batches = assemble(spec)
        self._spec = spec
        self._warmup = spec.warmup if warmup is None else warmup
        self.compilation: Compilation | None = None
        self._done = 0  # steps whose loss was looked at
        self._losses: list[object] = []  # of the steps since

    def __call__(self) -> None:
        self._losses.append(self.trainer.train_step(*self.batches))

    def warm_up(self, progress: Progress = no_progress) -> None:
        """Take the steps before the measured ones; raise at the first loss that is not finite."""
        self.compile(progress)
        self.capture(progress)
        for done in range(self._warmup):
            self()
            self.require_finite_losses()
            progress("warm-up", done + 1, self._warmup)
        if self.compilation is not None:
            self.compilation.begin_measuring()
        self.trainer.begin_measuring()

    def compile(self, progress: Progress = no_progress) -> None:
        """Take steps until torch.compile has nothing left to do, if the spec compiles."""
        if self._spec.compile == EAGER:
            return

        def step() -> None:
            self()
            self.require_finite_losses()  # which waits for the device

        # The peak of a CUDA graph is that of its capture, which is among these steps.
        device = None if self._spec.cuda_graph else self._spec.device
        self.compilation = Compilation.of(step, device, progress)

    def capture(self, progress: Progress = no_progress) -> None:
        """Take steps until they replay a CUDA graph, if the spec asks for one."""
        for done in range(STEPS_TO_CAPTURE if self._spec.cuda_graph else 0):
            self()
            self.require_finite_losses()
            progress("capturing", done + 1, STEPS_TO_CAPTURE)

    @property
    def is_opaque(self) -> bool:
        """True if nothing can be seen of what a step does: it is compiled, or a CUDA graph."""
        return self.compilation is not None or self._spec.cuda_graph

    def notes(self) -> list[Note]:
        """Return what a reader of the row's figures should know. Call it after all steps."""
        return [*self.trainer.notes(), *(self.compilation.notes() if self.compilation else ())]

    def peak(self) -> MemoryPayload:
        """Return the peak of the steps so far (CUDA), or of one more step (CPU). Call it after all timed steps."""
        if self._spec.device == "cuda":
            return cuda_peak()
        self.require_finite_losses()  # what is kept of the losses is none of the step's
        self.trainer.optimizer.zero_grad(set_to_none=True)
        held = (self.trainer.model.state_dict(keep_vars=True), self.trainer.optimizer.state_dict(), self.batches)
        return cpu_peak(self, map(local, tensors_of(held)))

    def require_finite_losses(self) -> None:
        """Raise `MeasurementFailed`, which names the first step whose loss is inf or NaN. Waits for the device."""
        losses, self._losses = self._losses, []
        if self._spec.simulate_world > 1:
            return  # the weights of other ranks are made up, and losses mean nothing
        for loss in losses:
            if isinstance(loss, Tensor | float | int) and not math.isfinite(value := float(loss)):
                raise MeasurementFailed(self._sentence(value))
            self._done += 1

    def require_finite(self) -> None:
        """Check the losses, and the parameters after the last update. Call it after all measurements."""
        self.require_finite_losses()
        if name := _parameter_not_finite(self.trainer):
            raise MeasurementFailed(
                f"the loss was finite, but after {self._name(self._done - 1)} parameter {name} holds inf or NaN: its "
                f"gradient is not finite, or training diverges. {self._advice()}"
            )

    def _sentence(self, loss: float) -> str:
        if self._done == 0:
            return f"the loss is {loss} from the first step on ({self._name(0)}), {BEFORE_ANY_UPDATE}"
        return (
            f"the loss is {loss} from {self._name(self._done)} on, and was finite before: training diverges, or a "
            f"gradient is not finite. {self._advice()}"
        )

    def _name(self, step: int) -> str:
        compiling = self.compilation.steps if self.compilation else 0
        if step < compiling or self._compiles_now:
            return f"step {step + 1} of compilation"
        step -= compiling + (STEPS_TO_CAPTURE if self._spec.cuda_graph else 0)
        if step < 0:
            return f"step {step + STEPS_TO_CAPTURE + 1} before the CUDA graph"
        if step < self._warmup:
            return f"warm-up step {step + 1}"
        return f"step {step - self._warmup + 1}" + (" after the warm-up" if self._warmup else "")

    @property
    def _compiles_now(self) -> bool:
        return self.compilation is None and self._spec.compile != EAGER

    def _advice(self) -> str:
        return f"Try --learning-rate {self._spec.learning_rate / 100:g}, and look at the loss function"


def _parameter_not_finite(trainer: TrainerBase) -> str | None:
    """Return the first parameter that is not finite. Only extremes are computed, which needs no extra memory."""
    for name, parameter in trainer.model.named_parameters():
        values = parameter.detach()
        if values.numel() and parameter.requires_grad and (values.is_floating_point() or values.is_complex()):
            plain = torch.view_as_real(values) if values.is_complex() else values
            if not all(math.isfinite(float(extreme)) for extreme in torch.aminmax(plain)):
                return name
    return None
