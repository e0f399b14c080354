"""The workload as it is checked: one model whose copies all start alike, one batch, and nothing random."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpscope.audit.loop import free_memory
from dpscope.batches import LossFn, batch_size_of, cast_batch
from dpscope.errors import UserError
from dpscope.flash.oracle import gradients_by_name
from dpscope.random_states import seed_all
from dpscope.trainers.base import require_loss_per_sample, require_trainable
from dpscope.units import list_names
from dpscope.workloads.workload import Batch, Workload, silence

# Two runs of the same float64 computation agree far better; models that go through float32 inside, only to this.
REPEATABLE = 1e-5
FILL_DEVIATION = 0.02
# Float64 copies of the model that a check takes: on the CPU those of the reference (4), of the method and its updates.
HOST_COPIES, DEVICE_COPIES = 7, 3
SMALL_COPY = 2**26  # bytes


@dataclass(frozen=True)
class Subject:
    model: nn.Module  # the pattern: every use takes a copy of it
    batch: Batch
    loss: LossFn
    seed: int
    device: torch.device
    batch_size: int  # samples in the batch
    notes: list[str] = field(default_factory=list)  # what was changed for the check

    def fresh(self, dtype: torch.dtype) -> tuple[nn.Module, Batch]:
        """Return a new copy of the model, and the batch, with floating-point numbers in `dtype`."""
        return copy.deepcopy(self.model).to(dtype), cast_batch(self.batch, dtype)

    @property
    def trainable(self) -> list[str]:
        return [name for name, p in self.model.named_parameters() if p.requires_grad]

    @property
    def tied(self) -> list[list[str]]:
        """Names of each parameter that has more than one."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return [group for group in names.values() if len(group) > 1]


def make_subject(workload: Workload, *, seed: int, device: str) -> Subject:
    """Return the workload's model and batch, with randomness off and zeros filled in; `notes` list the changes."""
    where = torch.device(device)
    seed_all(seed)
    with where:
        model = workload.model()
    require_trainable(model)
    require_memory(model, where)
    batch = workload.batch(seed, where)
    notes = []
    if quiet := silence(model):
        notes.append(f"dropout is off for the check ({quiet} modules)")
    subject = Subject(model, batch, workload.loss, seed, where, batch_size_of(batch), notes)
    _require_repeatable(subject)
    # Parameters whose gradient is zero although the loss depends on them, as LoRA's A while B is zero: such a gradient
    # does not show which method is right.
    copied, inputs = subject.fresh(torch.float32)
    losses = subject.loss(copied, inputs)
    if not losses.requires_grad:
        raise UserError("no parameter receives a gradient: the loss is detached from the model")
    found = gradients_by_name(losses.sum(), copied)
    hidden = [name for name, gradient in found.items() if gradient is not None and not gradient.any()]
    zero = {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel() and not p.any()}
    if hidden and zero:
        for parameter in zero.values():
            parameter.detach().normal_(std=FILL_DEVIATION)
        notes.append(
            f"no gradient reaches {list_names(hidden, 1)} at first, and others start at zero; those were given small "
            f"random values for the check: {list_names(zero, 1)}"
        )
    return subject


def require_memory(model: nn.Module, device: torch.device) -> None:
    """Raise `UserError` if a check of the model would not fit into memory: the system would kill it silently."""
    copy_bytes = 8 * sum(p.numel() for p in model.parameters())
    places = [("this machine's memory", HOST_COPIES, free_memory())]
    if device.type == "cuda":
        places.append(("the GPU's memory", DEVICE_COPIES, torch.cuda.mem_get_info(device)[0]))
    for place, copies, free in places:
        if free is not None and copies * copy_bytes > free and copy_bytes > SMALL_COPY:
            raise UserError(
                f"a check of {copy_bytes / 8e6:.0f} million parameters takes about {copies * copy_bytes / 1e9:.3g} GB, "
                f"and {free / 1e9:.2g} GB of {place} are free: use fewer layers (--num-layers 2), a smaller width or "
                "vocabulary, or a larger machine"
            )


def _require_repeatable(subject: Subject) -> None:
    """Raise `UserError` unless two runs give the same losses, one a sample, some of them finite.

    Gradients stay enabled while a loss is computed, because it may take gradients itself (adversarial training).
    """
    model, batch = subject.fresh(torch.float64)
    first, second = subject.loss(model, batch), subject.loss(model, batch)
    require_loss_per_sample(first)
    if len(first) != subject.batch_size:
        raise UserError(
            f"the loss of a batch of {subject.batch_size} samples has shape {tuple(first.shape)}: one loss per sample "
            "is needed, and the first dimension of every tensor of the batch has to be the sample"
        )
    if not first.isfinite().any():
        values = ", ".join(sorted({str(value) for value in first.tolist()}))
        raise UserError(
            f"the loss of every sample is {values}: there is nothing to check. Look for a division by zero, a "
            "logarithm of zero or an overflow in the model, the data and the loss function"
        )
    if not torch.allclose(first, second, rtol=REPEATABLE, atol=0, equal_nan=True):
        raise UserError(
            "the same batch gives another loss the second time: something in the model is random (dropout that is no "
            "module?) or keeps state; a check needs it off"
        )


class _Narrowing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that records if float64 tensors are turned into anything narrower."""

    found: bool = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        narrow = isinstance(output, Tensor) and output.dtype in (torch.float32, torch.bfloat16, torch.float16)
        self.found |= narrow and any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in args)
        return output


def computes_in_float32(subject: Subject) -> bool:
    """Return whether the model computes in float32 inside, whatever it is given, as Hugging Face's RMSNorm does."""
    model, batch = subject.fresh(torch.float64)
    with _Narrowing() as mode:  # type: ignore[no-untyped-call]
        subject.loss(model, batch)
    return bool(mode.found)
