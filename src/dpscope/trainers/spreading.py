"""A model spread over the processes of torch.distributed, as PyTorch's documentation says."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpscope.trainers.checkpointing import find_blocks
from dpscope.vocabulary.settings import TrainerSettings

REPLICAS = 2  # of hsdp


def casts_by_itself(settings: TrainerSettings) -> bool:
    """Whether FSDP2's policy does what autocast would: parameters travel, and are multiplied, in bf16."""
    return settings.world_size > 1 and settings.parallel != "ddp"


def spread(model: nn.Module, settings: TrainerSettings) -> nn.Module:
    """The model on `settings.world_size` processes: whole on each (ddp), or each block sharded, and the rest."""
    device = next(model.parameters()).device
    if settings.parallel == "ddp":
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dimensions = {"shard": settings.world_size}
    if settings.parallel == "hsdp":
        dimensions = {"replicate": REPLICAS, "shard": settings.world_size // REPLICAS}
    half = torch.bfloat16 if settings.dtype == "bf16" else None
    wide = None if half is None else torch.float32
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    }
    for block in find_blocks(model):
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=half, reduce_dtype=wide), **options)
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=wide, output_dtype=wide)
    fully_shard(model, mp_policy=policy, **options)
    return model
