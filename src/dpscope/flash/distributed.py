"""Refuse models that are spread over several processes or devices: flash clipping trains in one, on one."""

from __future__ import annotations

from typing import NoReturn

import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpscope.errors import UserError
from dpscope.flash.instance_method import InstanceMethod

# Known by the names of their classes: torch's, Opacus's, and those of libraries that need not be installed. FSDP2's
# fully_shard gives a module a class of its own that inherits from FSDPModule.
_WRAPPERS = {
    "DataParallel",
    "DistributedDataParallel",
    "DifferentiallyPrivateDistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DeepSpeedEngine",
}
_INSTEAD = "flash clipping trains in one process on one device"


def refuse_distributed_model(model: nn.Module) -> None:
    """Raises UserError if the model, a part of it or a parameter lives on several processes or devices."""
    for name, module in model.named_modules():
        found = _WRAPPERS.intersection(cls.__name__ for cls in type(module).__mro__)
        if found:
            raise UserError(
                f"{name or 'the model'} ({type(module).__name__}) spreads the model over processes or devices "
                f"({', '.join(sorted(found))}); {_INSTEAD}: pass the module without it"
            )
    for name, parameter in model.named_parameters():
        if any(cls.__name__ == "DTensor" for cls in type(parameter).__mro__):
            raise UserError(
                f"{name} is a DTensor, spread over processes (tensor parallelism or FSDP); {_INSTEAD}: make the model "
                "private before it is spread, and do not spread it"
            )


def refuse_several_processes() -> None:
    """Raises UserError if torch.distributed runs more than one process: each would add noise to a model of its own."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    processes = torch.distributed.get_world_size()
    if processes > 1:
        raise UserError(
            f"torch.distributed runs {processes} processes, and {_INSTEAD}: gradients are not exchanged, so the models "
            "of the processes would drift apart; train in one process, or use opacus.PrivacyEngine with Opacus's "
            "DifferentiallyPrivateDistributedDataParallel"
        )


def refuse_ddp_forward() -> None:
    """Raises UserError inside the forward of torch's DistributedDataParallel, wrapped around a private model."""
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise UserError(
            f"the private model is inside DistributedDataParallel, which exchanges gradients that were not clipped; "
            f"{_INSTEAD}: call the model itself"
        )


class ReplicaTap(InstanceMethod):
    """Stands where nn.DataParallel asks the model for a copy of itself on another device."""

    attribute = "_replicate_for_data_parallel"

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise UserError(f"the private model is inside DataParallel; {_INSTEAD}: call the model itself")
