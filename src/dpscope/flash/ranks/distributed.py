"""Refusals of a private model that is spread over processes or devices afterwards, or has diverging copies."""

from __future__ import annotations

from typing import NoReturn

import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from dpscope.errors import UserError
from dpscope.flash.torch_side.instance_method import InstanceMethod

_INSTEAD = "wrap the model in DistributedDataParallel, or shard it with fully_shard, and call make_private then"


def is_initialised() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def refuse_several_processes() -> None:
    """Raise UserError if torch.distributed runs more than one process: each would add noise to its own model."""
    if not is_initialised():
        return
    processes = torch.distributed.get_world_size()
    if processes > 1:
        raise UserError(
            f"torch.distributed runs {processes} processes, and nothing spreads the model over them: gradients are not "
            f"exchanged, so the models of the processes would drift apart; {_INSTEAD}"
        )


def refuse_ddp_forward() -> None:
    """Raise UserError inside the forward of a DistributedDataParallel that wraps a private model."""
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise UserError(
            "the private model is inside DistributedDataParallel, which exchanges gradients that were not clipped; "
            f"{_INSTEAD}"
        )


class ReplicaTap(InstanceMethod):
    """Replaces the method by which nn.DataParallel copies the model to another device."""

    attribute = "_replicate_for_data_parallel"

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise UserError("the private model is inside DataParallel, which copies it to other devices: call it directly")
