"""The contract between a workload and the methods that train it; seeded random data; adapters on any model."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpscope.errors import UserError
from dpscope.packages import import_for
from dpscope.places import load_at
from dpscope.vocabulary.settings import PARAM_DTYPES
from dpscope.workloads.configs import ImageConfig, LoraSettings, TransformerConfig, WorkloadConfig

Batch = Any  # a pytree of tensors whose first dimension is the sample


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Model, batch and loss that are trained, each built fresh by a callable.

    Args:
        model: Builds the model on torch's default device.
        batch: Takes a seed and a device; returns one batch, a pytree of tensors whose first dimension is the sample.
        loss: Takes the model and a batch; returns one loss for each sample, shape (B,). Trainers take its mean.

    Raises:
        UserError: A part is not a function that can be called like this.

    Example:
        >>> def make(batch_size):
        ...     def batch(seed, device):
        ...         return torch.randn(batch_size, 64, device=device)
        ...
        ...     return dpscope.Workload(model=MyModel, batch=batch, loss=lambda model, x: model(x).square().mean(1))
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, torch.device], Batch]  # (seed, device)
    loss: Callable[[nn.Module, Batch], Tensor]

    def __post_init__(self) -> None:
        for part, arguments in (("model", ()), ("batch", ("seed", "device")), ("loss", ("model", "batch"))):
            value = getattr(self, part)
            call = f"{part}({', '.join(arguments)})"
            if not callable(value) or isinstance(value, nn.Module):
                raise UserError(
                    f"Workload({part}=…) must be a function that dpscope calls as {call}, not "
                    f"{type(value).__name__}: everything is built fresh in each process"
                )
            if not _can_be_called_with(value, arguments):
                raise UserError(f"Workload({part}=…) must be a function that dpscope can call as {call}")


def _can_be_called_with(function: Callable[..., Any], arguments: tuple[str, ...]) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # no signature to be had of something compiled
        return True
    return True


def build_workload(config: WorkloadConfig, *, batch_size: int, seq_len: int | None) -> Workload:
    workload: Workload = load_at(config.builder)(config, batch_size=batch_size, seq_len=seq_len)
    lora = config.lora
    if lora is None:
        return workload
    require_peft()
    return replace(workload, model=lambda: adapt(workload.model(), lora))


def build_model(workload: Workload, param_dtype: str) -> nn.Module:
    """Return the workload's model on torch's default device, its weights in `param_dtype` from the first moment on.

    If part of the model is frozen, trained parameters keep the format that they are built in: peft makes adapters of
    bf16 weights in float32.
    """
    dtype: torch.dtype = getattr(torch, PARAM_DTYPES[param_dtype])
    with _default_dtype(dtype):
        model = workload.model()
    if dtype == torch.float32 or not isinstance(model, nn.Module):
        return model
    adapted = any(not parameter.requires_grad for parameter in model.parameters())
    for parameter in model.parameters():
        if parameter.dtype == torch.float32 and not (adapted and parameter.requires_grad):
            parameter.data = parameter.data.to(dtype)
    return model


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Attributes that hold a probability, by a part of their name, and the value that takes the randomness away.
_PROBABILITIES = {"drop": 0.0, "survival": 1.0, "keep_prob": 1.0}


def silence(model: nn.Module) -> int:
    """Switch off dropout and stochastic depth (a module's `p` or `attention_dropout`). Return how many modules."""
    found = 0
    for module in model.modules():
        values = {
            name: quiet
            for name, value in vars(module).items()
            for part, quiet in _PROBABILITIES.items()
            if part in name.lower() and isinstance(value, float) and value != quiet
        }
        is_dropout = "drop" in type(module).__name__.lower() or type(module).__name__ == "StochasticDepth"
        if is_dropout and isinstance(getattr(module, "p", None), (int, float)) and module.p:
            values["p"] = 0.0
        for name, quiet in values.items():
            setattr(module, name, quiet)
        found += bool(values)
    return found


def get_random_dataloader(
    config: WorkloadConfig,
    *,
    batch_size: int,
    seq_len: int | None = None,
    num_batches: int = 1,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> DataLoader[tuple[Tensor, ...]]:
    """Return batches of (inputs, targets) that already lie on `device`.

    Drawn on the CPU and then moved, so that a seed means the same data everywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    samples = batch_size * num_batches
    if isinstance(config, TransformerConfig):
        length = config.resolve_seq_len(seq_len)
        tokens = torch.randint(config.vocab_size, (samples, length + 1), generator=generator)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    elif isinstance(config, ImageConfig):
        inputs = torch.randn(samples, 3, config.image_size, config.image_size, generator=generator)
        targets = torch.randint(config.num_classes, (samples,), generator=generator)
    else:
        raise UserError(f"{config.name!r} makes its own batches: build_workload(config, …).batch(seed, device)")
    dataset = TensorDataset(inputs.to(device), targets.to(device))
    return DataLoader(dataset, batch_size=batch_size)


def random_workload(
    config: WorkloadConfig,
    model: Callable[[Any], nn.Module],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    batch_size: int,
    seq_len: int | None,
) -> Workload:
    """Return a model made of a config, on one random batch."""

    def batch(seed: int, device: torch.device) -> tuple[Tensor, ...]:
        loader = get_random_dataloader(config, batch_size=batch_size, seq_len=seq_len, seed=seed, device=device)
        found: tuple[Tensor, ...] = next(iter(loader))
        return found

    return Workload(model=partial(model, config), batch=batch, loss=loss)


ALL_LINEAR = "all-linear"


def require_peft() -> Any:
    """Import peft, which makes tensors on torch's default device: call this before a plan makes that a fake one."""
    return import_for("--lora", "peft")


def adapt(model: nn.Module, lora: LoraSettings) -> nn.Module:
    """Return the model with adapters on the modules that `lora.target` names.

    Both factors are drawn at random. peft's own start, B = 0, would give A no gradient in the first step, and a step
    that is compared or checked should be one in which every adapter moves.
    """
    peft = require_peft()
    if lora.target != (ALL_LINEAR,):
        names = [name for name, _ in model.named_modules()]
        for target in lora.target:
            if not any(name == target or name.endswith(f".{target}") for name in names):
                raise UserError(f"--lora target={target}: the model has no such module; it has {_adaptable(model)}")
    settings = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=ALL_LINEAR if lora.target == (ALL_LINEAR,) else list(lora.target),
        lora_dropout=0.0,
        init_lora_weights=False,
    )
    try:
        with warnings.catch_warnings():  # peft turns the matrices of GPT-2's Conv1D by itself, and says so
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
            adapted: nn.Module = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise UserError(f"--lora: peft refuses this model: {str(error).splitlines()[0]}") from None
    return adapted


def _adaptable(model: nn.Module) -> str:
    """Return the last name parts of modules that hold a matrix, each once: the names that people give as targets."""
    found = dict.fromkeys(
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if name and (weight := module._parameters.get("weight")) is not None and weight.dim() > 1
    )
    words = [name for name in found if not name.isdigit()] or list(found)
    return ", ".join(words[:12]) + (", …" if len(words) > 12 else "")
