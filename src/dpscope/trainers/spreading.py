"""A model spread over the processes of torch.distributed, as PyTorch's documentation says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpscope.flash.torch_side.torch_version import require_for_shards
from dpscope.trainers.checkpointing import find_blocks
from dpscope.vocabulary.settings import TrainerSettings

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

REPLICAS = 2  # of hsdp


def is_sharded(settings: TrainerSettings) -> bool:
    """Return whether FSDP2 holds the model. Its policy then replaces autocast: parameters travel in bf16."""
    return settings.world_size > 1 and settings.parallel != "ddp"


def policy_of(settings: TrainerSettings, **more: Any) -> MixedPrecisionPolicy:
    """Return FSDP2's policy for the number format of a row; gradients are reduced in float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if settings.dtype != "bf16":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, **more)


def _reduced_alone(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Reduce gradients for DDP in a simulated world, whose collectives return immediately."""
    dist.all_reduce(buffer)
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
    done.set_result(buffer)
    return done


def spread(model: nn.Module, settings: TrainerSettings) -> nn.Module:
    """Return the model on `settings.world_size` processes: whole on each (ddp), or each block sharded, and the rest."""
    device = next(model.parameters()).device
    if settings.parallel == "ddp":
        whole = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
        if settings.simulate_world > 1:
            whole.register_comm_hook(None, lambda _, bucket: _reduced_alone(bucket.buffer()))
        return whole
    require_for_shards()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dimensions = {"shard": settings.world_size}
    if settings.parallel == "hsdp":
        dimensions = {"replicate": REPLICAS, "shard": settings.world_size // REPLICAS}
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    }
    for block in find_blocks(model):
        fully_shard(block, mp_policy=policy_of(settings), **options)
    fully_shard(model, mp_policy=policy_of(settings, output_dtype=torch.float32), **options)
    return model
