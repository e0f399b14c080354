"""A workload as result files describe it: the flags that name it, and its sizes for people to read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from dpscope.vocabulary.settings import flags_of
from dpscope.workloads.configs import MODEL_SIZES, PRESETS
from dpscope.workloads.configs.huggingface import OUR_SIZES

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
