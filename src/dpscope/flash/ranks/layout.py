"""Layout of a model over processes, and refusal of layouts that cannot be trained privately."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpscope.errors import UserError
from dpscope.flash.combinations import (
    DDP_OPTIONS,
    MESHES,
    MODEL_PARALLEL,
    OFFLOADED,
    PART_OF_WORLD,
    SAMPLED_SHARDS,
    SHARDS_IN_DDP,
    WRAPPERS,
)
from dpscope.flash.torch_side.frames import original_of
from dpscope.flash.torch_side.instance_method import InstanceMethod
from dpscope.flash.torch_side.shards import is_sharded
from dpscope.flash.torch_side.torch_version import require_for_shards

_REPLICATED = ("DistributedDataParallel", "DifferentiallyPrivateDistributedDataParallel")
# Words in the names of mesh dimensions over which one sample is spread.
_SAMPLE_DIMENSIONS = {"tp", "tensor", "cp", "context", "sp", "sequence", "pp", "pipeline"}


def class_names(module: nn.Module) -> set[str]:
    """Return the names of the module's class and its bases. FSDP2 adds FSDPModule to a module's bases."""
    return {cls.__name__ for cls in type(module).__mro__}


def is_fsdp(module: nn.Module) -> bool:
    """Return True if `fully_shard` was called on the module."""
    return "FSDPModule" in class_names(module)


@dataclass(frozen=True)
class Layout:
    """Layout of a model. wrapper: DDP's, which adds up gradients; given: inside of it, perhaps compiled."""

    wrapper: nn.Module | None
    given: nn.Module
    mesh: Any  # DeviceMesh of sharded parameters, or None where they are whole on every rank

    @property
    def is_spread(self) -> bool:
        """True if several processes train the model."""
        return self.wrapper is not None or self.mesh is not None

    @property
    def module(self) -> nn.Module:
        """The model itself, without wrappers of DDP and torch.compile."""
        return original_of(self.given)

    def describe(self) -> tuple[str, ...]:
        """Return the facts that have to be the same on all ranks."""
        kind = "DDP" if self.mesh is None else f"{'HSDP' if self.mesh.ndim == 2 else 'FSDP2'} {tuple(self.mesh.shape)}"
        parameters = (
            f"{name} {tuple(p.shape)} {p.dtype} {'trained' if p.requires_grad else 'frozen'}"
            for name, p in self.module.named_parameters()
        )
        return (kind, *parameters)


def is_spread(model: nn.Module) -> bool:
    """Return True if the model is spread over processes, so that `layout_of` may return its layout."""
    return (
        bool(class_names(original_of(model)).intersection(_REPLICATED))
        or any(is_fsdp(module) for module in model.modules())
        or any(is_sharded(parameter) for parameter in model.parameters())
    )


def require_initialised() -> None:
    if not is_initialised():
        raise UserError("the model is spread over processes, but torch.distributed is not initialised")


def layout_of(model: nn.Module) -> Layout:
    """Return how the model is spread, perhaps not at all. Raise UserError for unsupported ways."""
    for name, module in model.named_modules():
        for found in class_names(module).intersection(WRAPPERS):
            raise WRAPPERS[found].error(name=name or "the model", kind=type(module).__name__)
    _refuse_devices(model)
    model = original_of(model) if class_names(original_of(model)).intersection(_REPLICATED) else model
    wrapper = model if class_names(model).intersection(_REPLICATED) else None
    inner: Any = model if wrapper is None else wrapper.module
    for name, part in inner.named_modules():
        if class_names(part).intersection(_REPLICATED):
            raise UserError(f"{name} ({type(part).__name__}) is inside the model: wrap the whole model, and pass that")
    sharded = [(name, p) for name, p in inner.named_parameters() if is_sharded(p)]
    if wrapper is None and not sharded:
        if any(is_fsdp(part) for part in inner.modules()):
            raise UserError("the model was given to fully_shard, but none of its parameters is sharded")
        return Layout(None, model, None)
    require_initialised()
    if sharded and wrapper is not None:
        raise SHARDS_IN_DDP.error(name=sharded[0][0], kind=type(wrapper).__name__)
    if wrapper is not None:
        _check_ddp(wrapper)
        return Layout(wrapper, inner, None)
    outside = {id(parameter) for parameter, block in blocks(inner) if block is None}
    for name, parameter in sharded:
        if id(parameter) in outside:
            raise UserError(f"{name} is sharded, but not by fully_shard (tensor parallelism?): {MESHES}")
    require_for_shards()
    return Layout(None, inner, _common_mesh(sharded))


def _refuse_devices(model: nn.Module) -> None:
    """Refuse models on several devices: a sample's norm is added up, and its factor applied, on one device."""
    homes: dict[str, str] = {}  # device -> the first trained parameter there
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            homes.setdefault(str(parameter.device), name)
    if len(homes) > 1:
        (device, name), (other, elsewhere) = list(homes.items())[:2]
        raise UserError(
            f"trained parameters are on several devices of one process: {name} on {device}, {elsewhere} on {other}. "
            "Put them on one device (no device_map), shard the model with fully_shard, or freeze the others"
        )


def blocks(module: nn.Module, block: nn.Module | None = None) -> Iterator[tuple[nn.Parameter, nn.Module | None]]:
    """Yield each parameter with the innermost module around it that was given to `fully_shard`, if there is one."""
    block = module if is_fsdp(module) else block
    for parameter in module._parameters.values():
        if parameter is not None:
            yield parameter, block
    for child in module.children():
        yield from blocks(child, block)


def _check_ddp(wrapper: nn.Module) -> None:
    if not isinstance(wrapper, DistributedDataParallel):
        return  # Opacus's, which does nothing but broadcast at its beginning
    if wrapper.process_group.size() != dist.get_world_size():
        raise UserError(
            f"DistributedDataParallel runs over {wrapper.process_group.size()} of {dist.get_world_size()} processes, "
            f"so others hold another part of each sample, or another model: {MESHES}"
        )
    for option in ("static_graph", "mixed_precision"):
        if getattr(wrapper, option, None):
            raise DDP_OPTIONS.error(option=option)


def _common_mesh(sharded: list[tuple[str, nn.Parameter]]) -> Any:
    """Return the mesh of all sharded parameters. Refuse meshes and placements other than those of FSDP2 and HSDP."""
    mesh: Any = None
    for name, parameter in sharded:
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        kinds = [type(placement).__name__ for placement in placements]
        if kinds not in (["Shard"], ["Replicate", "Shard"]) or placements[-1].dim != 0:
            raise UserError(
                f"{name} is placed as {placements}, which is neither FSDP2's (Shard(0),) nor HSDP's (Replicate(), "
                f"Shard(0)) (tensor parallelism, or a shard_placement_fn?): {MESHES}"
            )
        if mesh.size() != dist.get_world_size():
            raise PART_OF_WORLD.error(name=name, size=mesh.size(), world=dist.get_world_size())
        for dimension in mesh.mesh_dim_names or ():
            if _SAMPLE_DIMENSIONS.intersection(dimension.lower().split("_")):
                raise MODEL_PARALLEL.error(name=name, dimension=dimension)
        device = parameter.to_local().device  # type: ignore[attr-defined]
        if device.type != mesh.device_type:
            raise OFFLOADED.error(name=name, device=device, mesh=mesh.device_type)
    for name, parameter in sharded:
        if parameter.device_mesh != mesh:  # type: ignore[attr-defined]
            raise UserError(f"{name} and {sharded[-1][0]} are sharded over two different meshes: {MESHES}")
    return mesh


def refuse_spread_inside(units: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise `UserError` for a module that runs sample by sample, given with its name, with shards inside it."""
    for name, module in units:
        inside = [below for below, each in module.named_modules() if below and is_fsdp(each)]
        if inside:
            raise SAMPLED_SHARDS.error(name=name or "the model", kind=type(module).__name__, inside=inside[0])


def is_initialised() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class ReplicaTap(InstanceMethod):
    """Replaces the method by which nn.DataParallel copies the model to another device."""

    attribute = "_replicate_for_data_parallel"

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise UserError("the private model is inside DataParallel, which copies it to other devices: call it directly")
