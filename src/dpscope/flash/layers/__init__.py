"""Layer families, one file each, and the table that maps modules to families."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize

from dpscope.flash.layers.conv import ConvTap
from dpscope.flash.layers.embedding import EmbeddingTap, ScaledEmbeddingTap
from dpscope.flash.layers.linear import LinearTap, TransposedLinearTap
from dpscope.flash.layers.norm import GroupNormTap, LayerNormTap, RMSNormTap
from dpscope.flash.layers.torchs_own import class_is_own, instance_is_own, remember
from dpscope.flash.taps.taps import LayerTap
from dpscope.flash.torch_side.instance_method import instance_method

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
