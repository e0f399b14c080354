"""Private training with Hugging Face's Accelerate: `prepare_private` instead of `accelerator.prepare`.

Accelerate wraps, shards and compiles the model, replaces samplers, scales losses and clips gradients. So the model is
prepared first and then made private, and the loader stays the engine's own: a rank's share of one Poisson draw.
`accelerator.save_state` and `load_state` keep the spent privacy. With seeds (`noise_generator`, a loader with a
generator), a run that is saved after an epoch and resumed takes the steps of an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderAdapter
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import send_to_device
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpscope.errors import UserError
from dpscope.flash.opacus.privacy_engine import PrivacyEngine
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
from dpscope.privacy_budget import SpentPrivacy


class PlacedLoader:
    """A private loader whose batches come on a device."""

    def __init__(self, loader: DataLoader[Any], device: Any) -> None:
        self.loader = loader
        self.device = device

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield send_to_device(batch, self.device)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)


class PrivateAcceleratedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Accelerate's optimizer, whose step goes straight to the private one.

    Accelerate's own step checks twice if an optional package is installed, which reads the disk. Its other work, loss
    scaling and accumulation, is refused.
    """

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


def prepare_private(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    *,
    privacy_engine: PrivacyEngine | None = None,
    **privacy: Any,
) -> tuple[Any, Any, Any, PrivacyEngine]:
    """Prepare a model, its optimizer and its data with Accelerate, and make them private.

    Args:
        accelerator: The accelerator of the script.
        model: The model, not yet prepared.
        optimizer: Its optimizer, not yet prepared.
        data_loader: An ordinary loader over the whole data set, with the batch size of all processes together.
        privacy_engine: The engine to use. Default: a new one.
        **privacy: Arguments of `PrivacyEngine.make_private` (`noise_multiplier`, `max_grad_norm`, `pad_batches`, …);
            with `target_epsilon`, those of `make_private_with_epsilon`.

    Returns:
        The model, the optimizer and the loader for the training loop, and the privacy engine, which knows ε.

    Raises:
        UserError: Accelerate is set to something that cannot be private: fp16, accumulation, DeepSpeed, FSDP1.

    Example:
        >>> from accelerate import Accelerator
        >>> from dpscope.accelerate import prepare_private
        >>> model, optimizer, loader, engine = prepare_private(
        ...     Accelerator(), model, optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0
        ... )
    """
    _refuse(accelerator, model, optimizer, data_loader)
    engine = PrivacyEngine() if privacy_engine is None else privacy_engine
    prepared, accelerated = accelerator.prepare(model, optimizer)
    make = engine.make_private_with_epsilon if "target_epsilon" in privacy else engine.make_private
    _, private, loader = make(module=prepared, optimizer=accelerated.optimizer, data_loader=data_loader, **privacy)
    accelerated.optimizer, accelerated.__class__ = private, PrivateAcceleratedOptimizer
    spent = SpentPrivacy(engine.accountant)
    private.resumes_noise = spent.follow(data_loader.generator) and privacy.get("noise_generator") is not None
    accelerator.register_for_checkpointing(spent)
    return prepared, accelerated, PlacedLoader(loader, accelerator.device), engine


def _refuse(accelerator: Any, model: nn.Module, optimizer: Any, loader: Any) -> None:
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if accelerator.mixed_precision == "fp16":
        raise UserError(
            "mixed_precision='fp16' scales the loss without the engine's knowledge: use mixed_precision='bf16', or "
            "dpscope.flash.GradScaler in a loop of your own"
        )
    if accelerator.gradient_accumulation_steps > 1:
        raise UserError(
            f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps} adds up whole Poisson draws: give "
            "the loader the logical batch size, and pad_batches=SIZE for physical batches"
        )
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA") or (plugin is not None and plugin.fsdp_version != 2):
        raise UserError(
            f"{'FSDP1' if plugin is not None else kind} cannot be private: use DDP or FSDP2 (fsdp_version: 2)"
        )
    if isinstance(loader, DataLoaderAdapter):
        raise UserError(
            "the data loader was prepared by Accelerate, which splits batches over processes: give prepare_private the "
            "ordinary loader, and do not prepare it"
        )
    if isinstance(optimizer, (AcceleratedOptimizer, DPFlashOptimizer)) or getattr(
        model, "_is_accelerate_prepared", False
    ):
        raise UserError(
            "the model or the optimizer is prepared or private already: give prepare_private the ordinary ones, in "
            "place of accelerator.prepare"
        )
