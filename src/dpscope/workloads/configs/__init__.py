"""Workloads as data: a file for each family, its presets, and the table of them all.

Importing this imports neither torch nor any library of models.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from difflib import get_close_matches
from typing import Any

from dpscope.errors import UserError
from dpscope.workloads.configs import huggingface, transformer, vision
from dpscope.workloads.configs.base import LoraSettings, WorkloadConfig, parse_lora
from dpscope.workloads.configs.custom import CustomConfig, workload_at, workload_of
from dpscope.workloads.configs.huggingface import HuggingFaceConfig, config_from_file, config_from_json
from dpscope.workloads.configs.transformer import ATTENTIONS, TransformerConfig
from dpscope.workloads.configs.vision import NORMS, CNNConfig, ImageConfig, ResNetConfig

__all__ = [
    "ATTENTIONS",
    "MODEL_SIZES",
    "NORMS",
    "PRESETS",
    "CNNConfig",
    "CustomConfig",
    "HuggingFaceConfig",
    "ImageConfig",
    "LoraSettings",
    "ResNetConfig",
    "TransformerConfig",
    "WorkloadConfig",
    "config_from_dict",
    "config_from_file",
    "config_from_json",
    "config_to_dict",
    "find_workload",
    "make_config",
    "parse_lora",
    "with_lora",
    "workload_at",
]

PRESETS: dict[str, WorkloadConfig] = {
    preset.name: preset for family in (transformer, vision, huggingface) for preset in family.PRESETS
}

# Sizes that have a flag of their name, beside --attention and --norm.
MODEL_SIZES = (
    *("vocab_size", "hidden_dim", "intermediate_dim", "num_layers", "num_heads", "kv_heads", "max_seq_len"),
    *("image_size", "patch_size", "num_classes", "width"),
)

_KINDS: dict[str, type[WorkloadConfig]] = {
    config.kind: config for config in (TransformerConfig, CNNConfig, ResNetConfig, HuggingFaceConfig, CustomConfig)
}


def make_config(model: str, **sizes: Any) -> WorkloadConfig:
    """Return a preset with some of its sizes changed.

    Args:
        model: Name of a preset, such as `1b` or `hf:gpt2`.
        **sizes: Sizes by name, such as `num_layers=2`. None leaves a size as it is.

    Returns:
        The config, for `compare`, `plan` and `RunSpec`.

    Raises:
        UserError: There is no such preset, or it has no such size.

    Example:
        >>> config = dpscope.make_config("1b", num_layers=2)
    """
    try:
        preset = PRESETS[model]
    except KeyError:
        near = get_close_matches(model, PRESETS, n=1) or get_close_matches(f"hf:{model}", PRESETS, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise UserError(
            f"unknown model {model!r}{meant}: choose one of {', '.join(PRESETS)}; or any other architecture with "
            "--hf-config, or your own with --workload"
        ) from None
    return preset.resized(**{name: value for name, value in sizes.items() if value is not None})


def find_workload(workload: object) -> WorkloadConfig:
    """Return the config of a preset's name, of `FILE.py:function`, or of a function that returns a `Workload`."""
    if isinstance(workload, WorkloadConfig):
        return workload
    if isinstance(workload, str):
        own = ":" in workload and not workload.startswith("hf:")
        return workload_at(workload) if own else make_config(workload)
    if callable(workload):
        return workload_of(workload)
    raise UserError(
        f"give the function that makes the workload, or its place as 'FILE.py:function', not a "
        f"{type(workload).__name__}: everything is built fresh in each child process"
    )


def with_lora(config: WorkloadConfig, lora: LoraSettings) -> WorkloadConfig:
    """Return the same workload with adapters trained instead of the model."""
    return replace(config, lora=lora, name=f"{config.name}+lora-r{lora.r}")


def config_to_dict(config: WorkloadConfig) -> dict[str, Any]:
    values = asdict(config)
    if config.lora is None:
        del values["lora"]
    else:
        values["lora"]["target"] = list(config.lora.target)  # as JSON gives it back
    return {"kind": config.kind, **values}


def config_from_dict(data: dict[str, Any]) -> WorkloadConfig:
    values = dict(data)
    kind, lora = _KINDS[values.pop("kind")], values.pop("lora", None)
    return kind(**values, lora=None if lora is None else LoraSettings(**lora))
