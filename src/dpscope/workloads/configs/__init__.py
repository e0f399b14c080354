"""Workloads as data: their families and presets, and a workload as result files describe it, in flags and in words.

Importing this imports neither torch nor any library of models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import PurePath
from typing import Any

from dpscope.errors import UserError
from dpscope.vocabulary.settings import flags_of
from dpscope.workloads.configs import base, huggingface
from dpscope.workloads.configs.base import ATTENTIONS as ATTENTIONS
from dpscope.workloads.configs.base import NORMS as NORMS
from dpscope.workloads.configs.base import CNNConfig as CNNConfig
from dpscope.workloads.configs.base import ImageConfig as ImageConfig
from dpscope.workloads.configs.base import LoraSettings as LoraSettings
from dpscope.workloads.configs.base import ResNetConfig as ResNetConfig
from dpscope.workloads.configs.base import TransformerConfig as TransformerConfig
from dpscope.workloads.configs.base import WorkloadConfig as WorkloadConfig
from dpscope.workloads.configs.base import parse_lora as parse_lora
from dpscope.workloads.configs.custom import CustomConfig as CustomConfig
from dpscope.workloads.configs.custom import workload_at as workload_at
from dpscope.workloads.configs.custom import workload_of
from dpscope.workloads.configs.huggingface import OUR_SIZES
from dpscope.workloads.configs.huggingface import HuggingFaceConfig as HuggingFaceConfig
from dpscope.workloads.configs.huggingface import config_from_file as config_from_file
from dpscope.workloads.configs.huggingface import config_from_json as config_from_json

PRESETS: dict[str, WorkloadConfig] = {
    preset.name: preset for family in (base, huggingface) for preset in family.PRESETS
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


Described = Mapping[str, Any]  # what `config_to_dict` gave; files of others may hold anything

SITE = ("site-packages", "dist-packages")  # what is installed there is found without being told where


def workload_flags(workload: Described) -> list[str] | None:
    """Return the flags that name a workload and all its sizes; None if it was made in Python."""
    lora = workload.get("lora")
    name = str(workload["name"])
    adapters: list[str] = []
    if lora:
        if any(set(target) & set(",= ") for target in lora["target"]):
            return None
        name = name.removesuffix(f"+lora-r{lora['r']}")
        adapters = ["--lora", f"r={lora['r']},alpha={lora['alpha']},target={','.join(lora['target'])}"]
    kind = str(workload.get("kind"))
    named = {"custom": _custom, "huggingface": _hugging_face}.get(kind, _built_in)(name, workload)
    return None if named is None else [*named, *adapters]


def _built_in(name: str, workload: Described) -> list[str] | None:
    sizes = {key: workload[key] for key in (*MODEL_SIZES, "attention", "norm") if workload.get(key) is not None}
    return ["--model", name, *flags_of(sizes)] if _is_preset(name, workload) else None


def _is_preset(name: str, workload: Described) -> bool:
    return name in PRESETS and PRESETS[name].kind == workload.get("kind")


def _custom(name: str, workload: Described) -> list[str] | None:
    """Return the dotted name of a module if it has one: it is imported as a part of its package."""
    file, function, module = (workload.get(key) for key in ("file", "function", "module"))
    known = file and function and name == f"{module or PurePath(str(file)).name}:{function}"
    return ["--workload", f"{module or file}:{function}"] if known else None


def _hugging_face(name: str, workload: Described) -> list[str] | None:
    """Return the flags of a Hugging Face model. A configuration from a file always has its number of labels."""
    model_type, settings = workload.get("model_type"), workload.get("settings") or {}
    if name == f"hf:{model_type}" and "num_labels" in settings:
        whole = {"model_type": model_type, "architectures": [workload.get("architecture")], **settings}
        return ["--hf-config", json.dumps(whole, ensure_ascii=False)]
    sizes = {OUR_SIZES[key]: value for key, value in settings.items() if key in OUR_SIZES}
    return ["--model", name, *flags_of(sizes)] if _is_preset(name, workload) else None


def import_root(workload: Described) -> str:
    """Return the folder that has to be on PYTHONPATH for the package of a user's module; empty for other workloads."""
    module, file = workload.get("module"), workload.get("file")
    if workload.get("kind") != "custom" or not module or not file:
        return ""
    depth = str(module).count(".") + (PurePath(str(file)).name == "__init__.py")
    root = os.path.normpath(str(file) + "/.." * (depth + 1))  # of a path that may begin with ..
    return "" if PurePath(root).name in SITE else root


def workload_sizes(workload: Described) -> Iterator[str]:
    """Yield the sizes of a workload, and the numbers nested in it (a model's own configuration)."""
    for name, value in workload.items():
        if name == "lora":
            yield f"LoRA r {value['r']}, alpha {value['alpha']} on {' '.join(value['target'])}"
        elif isinstance(value, dict):
            numbers = {key: size for key, size in value.items() if type(size) in (int, float)}
            yield from (f"{key.replace('_', ' ')} {size}" for key, size in numbers.items())
        elif value is not None and name not in ("kind", "name", "sha256"):
            yield f"{name.replace('_', ' ')} {value}"
