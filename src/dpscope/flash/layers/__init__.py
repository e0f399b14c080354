"""Layer families, one file each, and the table that maps modules to families."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

from dpscope.flash.gradients.contributions import refuse_complex
from dpscope.flash.layers.bare import BareTap, own_parameters
from dpscope.flash.layers.conv import ConvTap
from dpscope.flash.layers.embedding import EmbeddingTap, ScaledEmbeddingTap
from dpscope.flash.layers.linear import LinearTap, TransposedLinearTap
from dpscope.flash.layers.norm import GroupNormTap, LayerNormTap, RMSNormTap
from dpscope.flash.layers.opaque import OpaqueTap
from dpscope.flash.layers.recurrent import RecurrentTap
from dpscope.flash.layers.refusals import RefusedTap, refusal_of, refuse_trained
from dpscope.flash.layers.sample_dims import hides_samples_from_its_layers, is_recurrent
from dpscope.flash.layers.torchs_own import class_is_own, instance_is_own, remember
from dpscope.flash.taps.taps import Engine, LayerTap
from dpscope.flash.torch_side.frames import is_wrapper, original_of, refuse_compiled_forwards
from dpscope.flash.torch_side.instance_method import InstanceMethod, instance_method
from dpscope.flash.torch_side.shards import is_sharded

MakeTap = Callable[[Engine, str, nn.Module], InstanceMethod]

_FAMILIES: dict[type[nn.Module], type[LayerTap]] = {
    nn.Linear: LinearTap,
    nn.Conv1d: ConvTap,
    nn.Conv2d: ConvTap,
    nn.Conv3d: ConvTap,
    nn.Embedding: EmbeddingTap,
    nn.LayerNorm: LayerNormTap,
    nn.RMSNorm: RMSNormTap,
    nn.GroupNorm: GroupNormTap,
    nn.InstanceNorm1d: GroupNormTap,
    nn.InstanceNorm2d: GroupNormTap,
    nn.InstanceNorm3d: GroupNormTap,
}

# Known by name, so that transformers need not be installed. Each is what its family computes, by its published code.
_TRANSFORMERS_FAMILIES: dict[str, type[LayerTap]] = {
    "Conv1D": TransposedLinearTap,
    "LlamaRMSNorm": RMSNormTap,
    "MistralRMSNorm": RMSNormTap,
    "Qwen2RMSNorm": RMSNormTap,
    "Qwen3RMSNorm": RMSNormTap,
    "T5LayerNorm": RMSNormTap,
    "GemmaTextScaledWordEmbedding": ScaledEmbeddingTap,
    "Gemma2TextScaledWordEmbedding": ScaledEmbeddingTap,
    "Gemma3TextScaledWordEmbedding": ScaledEmbeddingTap,
    "VaultGemmaTextScaledWordEmbedding": ScaledEmbeddingTap,
}


def register_layer(cls: type[nn.Module], handler: type[LayerTap]) -> None:
    """Register a layer family for a module class.

    Args:
        cls: The module class. Subclasses that change what its forward does need a registration of their own.
        handler: The family, a subclass of `LayerTap` that computes its per-sample gradients.

    Example:
        >>> register_layer(Shift, ShiftTap)  # both as in the example of `LayerTap`
    """
    _FAMILIES[cls] = handler
    remember(cls)


@dataclass(frozen=True)
class Unit:
    """A module that is tapped, under its qualified name."""

    name: str
    module: nn.Module
    make: MakeTap

    @property
    def opaque(self) -> bool:
        return self.make is OpaqueTap

    @property
    def layer(self) -> bool:
        return isinstance(self.make, type) and issubclass(self.make, LayerTap)

    @property
    def followed(self) -> bool:
        return self.make is BareTap


def family_of(module: nn.Module) -> type[LayerTap] | None:
    """Return the family whose forward this module runs.

    A subclass or instance that changes that forward belongs to no family.
    """
    if ("forward" in vars(module) and instance_method(module) is None) or parametrize.is_parametrized(module):
        return None
    for cls, handler in _FAMILIES.items():
        if not isinstance(module, cls) or not handler.accepts(module):
            continue
        if class_is_own(type(module), cls, handler.names) and instance_is_own(module, cls, handler.names):
            return handler
    cls = type(module)
    if cls.__module__.partition(".")[0] == "transformers":
        by_name = _TRANSFORMERS_FAMILIES.get(cls.__name__)
        return by_name if by_name is not None and by_name.accepts(module) else None
    return None


def own_class_of(module: nn.Module) -> type[nn.Module] | None:
    """Return torch's class, or a registered one, that the module is an instance of."""
    return next((cls for cls in _FAMILIES if isinstance(module, cls)), None)


def plan(model: nn.Module, whole: Collection[nn.Module] = (), followed: Collection[nn.Module] = ()) -> list[Unit]:
    """Return the modules to tap, and how. Raise UserError for modules that cannot be made private.

    whole     modules that run sample by sample, with all they contain
    followed  modules whose own parameters are followed, though they belong to a family or own none
    """
    for name, module in model.named_modules():
        refuse_trained(name, module)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            refuse_complex(name, parameter)
    units = list(_units(model, "", set(), whole, followed))
    layers_inside = {unit.module for unit in units if unit.layer}
    refuse_compiled_forwards(model, layers_inside, {unit.module for unit in units})
    return units


def _units(
    module: nn.Module,
    name: str,
    seen: set[nn.Module],
    whole: Collection[nn.Module],
    followed: Collection[nn.Module],
) -> Iterator[Unit]:
    if module in seen:
        return
    seen.add(module)
    if is_wrapper(module):
        yield from _units(original_of(module), name, seen, whole, followed)
        return
    if refusal_of(module) is not None:
        yield Unit(name, module, RefusedTap)
        return
    if hides_samples_from_its_layers(module) or (module in whole and not is_recurrent(module)):
        seen.update(module.modules())
        yield Unit(name, module, OpaqueTap)
        return
    owned = [parameter for _, _, parameter in own_parameters(module)]
    if owned or module in followed:
        family = family_of(module) if module not in followed else None
        if family is not None:
            yield Unit(name, module, family)
        elif module not in followed and _owns_frozen_alone(owned) and _calls_its_children(module):
            pass
        elif module not in whole and _can_be_followed(module):
            yield Unit(name, module, BareTap)
        else:
            seen.update(module.modules())
            yield Unit(name, module, RecurrentTap if is_recurrent(module) else OpaqueTap)
            return
    for key, child in module.named_children():
        if not isinstance(child, nn.ParameterList | nn.ParameterDict):  # its parameters are its parent's
            yield from _units(child, f"{name}.{key}" if name else key, seen, whole, followed)


def _can_be_followed(module: nn.Module) -> bool:
    """Return whether a module's own parameters may be followed: it uses them in its forward, and only there."""
    if is_recurrent(module):
        return False
    if any(is_sharded(parameter) for parameter in module.parameters()):
        return False
    return _calls_its_children(module) or not any(True for child in module.children() for _ in child.parameters())


def _owns_frozen_alone(owned: list[nn.Parameter]) -> bool:
    """Return whether a module's own parameters are all frozen. If unfrozen later, their gradient is refused."""
    return not any(parameter.requires_grad for parameter in owned)


def _calls_its_children(module: nn.Module) -> bool:
    """Return whether child modules use their own parameters; some torch layers read those of their children."""
    built_in = any(
        cls.__module__.startswith("torch.nn.modules.") and cls not in _CONTAINERS for cls in type(module).__mro__
    )
    return not built_in and any(True for child in module.children() for _ in child.parameters())


_CONTAINERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)
