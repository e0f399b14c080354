"""Opacus over several processes: its own DDP for flat and ghost clipping, FSDP2 for ghost clipping."""

from __future__ import annotations

from collections import defaultdict

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import get_gsm_class
from opacus.utils.module_utils import trainable_modules
from torch import nn

from dpscope.errors import UserError
from dpscope.flash.torch_side.torch_version import require, require_for_shards
from dpscope.sentences import list_names, name_module
from dpscope.trainers.spreading import is_sharded, policy_of
from dpscope.vocabulary.settings import TrainerSettings

# Before, gloo adds up gradients that FSDP2 asks it to average, without an error: a sample moves the sum by the bound
# times the number of ranks (github.com/pytorch/pytorch/issues/162338). NCCL averages them.
OLDEST_SHARDED_ON_CPU = (2, 11)


def require_spreadable(model: nn.Module, mode: str, settings: TrainerSettings) -> None:
    """Raise `UserError` for what Opacus cannot train in this `grad_sample_mode` over several processes."""
    if not is_sharded(settings):
        return
    require_for_shards()
    if settings.parallel == "hsdp":
        raise UserError(
            "Opacus cannot train over replicas of shards: its FSDP2Wrapper takes no mesh. Compare ghost with "
            "--parallel fsdp, or --methods standard,flash"
        )
    if mode == "hooks":
        raise UserError(
            "Opacus has no flat clipping of a sharded model: its hooks keep gradients of whole parameters for every "
            "sample. Compare flat with --parallel ddp, or --methods standard,ghost,flash"
        )
    try:
        import opacus.utils.fsdp_utils  # noqa: F401
    except ImportError:
        raise UserError("this Opacus cannot train a sharded model: install opacus 1.6 or newer") from None
    # FSDP2Wrapper leaves the mesh to torch, which takes the accelerator of the machine.
    if torch.cuda.is_available() and next(model.parameters()).device.type != "cuda":
        raise UserError(
            "Opacus shards a model on this machine's GPU only: leave out --device cpu, or compare --methods "
            "standard,flash"
        )
    _require_untied(model)
    _require_copyable(model)
    _require_rows_for_all(model, settings.world_size)
    if next(model.parameters()).device.type == "cpu":
        instead = "compare ghost with --parallel ddp, or --methods standard,flash"
        require(OLDEST_SHARDED_ON_CPU, "Opacus's training of a sharded model on a CPU", instead)


def _require_untied(model: nn.Module) -> None:
    """Refuse tied parameters: FSDP2Wrapper shards each layer by itself, and each would train its own copy."""
    holders = defaultdict(list)
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            holders[parameter].append(f"{module_name}.{name}".lstrip("."))
    if tied := next((names for names in holders.values() if len(names) > 1), None):
        raise UserError(
            f"Opacus cannot train tied weights of a sharded model ({list_names(tied)}): it shards each layer by "
            "itself. Untie them, or compare --methods standard,flash"
        )


def _require_copyable(model: nn.Module) -> None:
    """Refuse shards in a module without a rule: Opacus copies such modules, and shards cannot be copied."""
    rules = get_gsm_class("ghost_fsdp")
    for name, module in trainable_modules(model):
        below = (each for each in module.modules() if each is not module)
        has_shards = module is model or any(True for each in below for _ in each.parameters(recurse=False))
        if has_shards and type(module) not in {*rules.GRAD_SAMPLERS, *rules.NORM_SAMPLERS}:
            raise UserError(
                f"Opacus cannot train this model sharded: {name_module(name, module)} owns parameters beside its "
                "submodules. Move them to a submodule, or compare --methods standard,flash"
            )


def _require_rows_for_all(model: nn.Module, ranks: int) -> None:
    """Refuse parameters with fewer rows than ranks: DTensor keeps such a gradient whole on every rank."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dim() and len(parameter) < ranks:
            raise UserError(
                f"Opacus cannot train {name} of shape {tuple(parameter.shape)} in {ranks} shards: its first dimension "
                "is smaller than the number of ranks. Use fewer, or compare --methods standard,flash"
            )


def spread(model: nn.Module, settings: TrainerSettings) -> nn.Module:
    """Spread the model as Opacus's documentation says: whole on each process, or every layer sharded by itself."""
    if not is_sharded(settings):
        whole: nn.Module = DifferentiallyPrivateDistributedDataParallel(model)
        return whole
    from opacus.utils.fsdp_utils import FSDP2Wrapper

    FSDP2Wrapper(model, mp_policy=policy_of(settings))  # in place
    return model
