"""Command lines that measure given specs and nothing else, made from what results say of their specs."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from dpscope.vocabulary.settings import FLAGS
from dpscope.workloads.configs import MODEL_SIZES, PRESETS
from dpscope.workloads.configs.huggingface import OUR_SIZES

RowSpec = Mapping[str, Any]

SITE = ("site-packages", "dist-packages")  # what is installed there is found without being told where


def command_lines(specs: Sequence[RowSpec]) -> list[str]:
    """As few commands as measure each of the specs once and nothing else; to be run in the folder of the results.

    Commands measure every method at every batch size and every sequence length that they name, so only sizes that are
    a whole product share one. Specs that no command can express (see `can_be_typed`) have none.
    """
    groups: dict[str, list[RowSpec]] = {}
    for spec in filter(can_be_typed, specs):
        shared = json.dumps({**spec, "method": "", "batch_size": 0, "seq_len": 0}, sort_keys=True)
        groups.setdefault(shared, []).append(spec)
    return [
        _line(group[0], methods, batches, lengths)
        for group in groups.values()
        for methods, sizes in _sizes_by_methods(group).items()
        for batches, lengths in products(sizes)
    ]


def can_be_typed(spec: RowSpec) -> bool:
    """Is there a command for this spec? Not for a model that was made in Python, nor for a name with a comma in it."""
    return workload_flags(spec["workload"]) is not None and "," not in spec["method"]


def products(sizes: Iterable[tuple[int, int | None]]) -> list[tuple[tuple[int, ...], list[int | None]]]:
    """Sizes as products of batch sizes and sequence lengths that hold each size once, and no other."""
    batches_of: dict[int | None, list[int]] = {}
    for batch, length in sizes:
        batches_of.setdefault(length, []).append(batch)
    lengths_of: dict[tuple[bool, tuple[int, ...]], list[int | None]] = {}
    for length, batches in batches_of.items():
        lengths_of.setdefault((length is None, tuple(batches)), []).append(length)
    return [(batches, lengths) for (_, batches), lengths in lengths_of.items()]


def _sizes_by_methods(specs: Sequence[RowSpec]) -> dict[tuple[str, ...], list[tuple[int, int | None]]]:
    methods_at: dict[tuple[int, int | None], list[str]] = {}
    for spec in specs:
        methods_at.setdefault((spec["batch_size"], spec.get("seq_len")), []).append(spec["method"])
    by_methods: dict[tuple[str, ...], list[tuple[int, int | None]]] = {}
    for size, methods in sorted(methods_at.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
        by_methods.setdefault(tuple(dict.fromkeys(methods)), []).append(size)
    return by_methods


def _line(spec: RowSpec, methods: Sequence[str], batches: Sequence[int], lengths: Sequence[int | None]) -> str:
    lists = {"methods": methods, "batch_size": batches, "seq_len": [length for length in lengths if length]}
    told = {name: ",".join(map(str, values)) for name, values in lists.items() if values}
    told |= {name: spec[name] for name in FLAGS if name in spec}
    words = [*_subcommand(spec), *(workload_flags(spec["workload"]) or ()), *flags(told), "--out", ".", "--resume"]
    return " ".join([*_import_path(spec["workload"]), "dpscope", *map(_quote, words)])


def _subcommand(spec: RowSpec) -> list[str]:
    """`compare` measures with one instrument alone; an instrument's own command knows how else it can look."""
    instrument, options = spec["instrument"], spec.get("options") or {}
    if not options:
        return ["compare", "--instruments", instrument]
    log = ["--no-log"] if instrument == "trace" else []  # which is no part of the results
    return [instrument, *flags(options), *log]


def flags(values: Mapping[str, Any]) -> list[str]:
    """`--batch-size 8`; a switch that is on has no value. Numbers are written in full."""
    words = []
    for name, value in values.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def workload_flags(workload: Mapping[str, Any]) -> list[str] | None:
    """What names a workload and all its sizes on the command line; None where nothing does."""
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


def _built_in(name: str, workload: Mapping[str, Any]) -> list[str] | None:
    if not _is_preset(name, workload):
        return None
    sizes = {key: workload[key] for key in (*MODEL_SIZES, "attention", "norm") if workload.get(key) is not None}
    return ["--model", name, *flags(sizes)]


def _is_preset(name: str, workload: Mapping[str, Any]) -> bool:
    return name in PRESETS and PRESETS[name].kind == workload.get("kind")


def _custom(name: str, workload: Mapping[str, Any]) -> list[str] | None:
    """The dotted name of a module if it has one: it is imported as a part of its package."""
    file, function, module = (workload.get(key) for key in ("file", "function", "module"))
    known = file and function and name == f"{module or PurePath(str(file)).name}:{function}"
    return ["--workload", f"{module or file}:{function}"] if known else None


def _hugging_face(name: str, workload: Mapping[str, Any]) -> list[str] | None:
    """A configuration from a file always says how many labels there are. All of it stands in the result."""
    model_type, settings = workload.get("model_type"), workload.get("settings") or {}
    if name == f"hf:{model_type}" and "num_labels" in settings:
        whole = {"model_type": model_type, "architectures": [workload.get("architecture")], **settings}
        return ["--hf-config", json.dumps(whole, ensure_ascii=False)]
    if not _is_preset(name, workload):
        return None
    sizes = {OUR_SIZES[key]: value for key, value in settings.items() if key in OUR_SIZES}
    return ["--model", name, *flags(sizes)]


def _import_path(workload: Mapping[str, Any]) -> list[str]:
    """Where the package of a user's module is, as an assignment before the command; nothing for other workloads."""
    module, file = workload.get("module"), workload.get("file")
    if workload.get("kind") != "custom" or not module or not file:
        return []
    depth = str(module).count(".") + (PurePath(str(file)).name == "__init__.py")
    root = os.path.normpath(str(file) + "/.." * (depth + 1))  # of a path that may begin with ..
    return [] if PurePath(root).name in SITE else [f"PYTHONPATH={_quote(root)}:$PYTHONPATH"]


def _quote(word: str) -> str:
    """Quote a word for a shell, except a leading ~, which the shell replaces by the home folder."""
    home, slash, rest = word.partition("/")
    if home != "~":
        return shlex.quote(word)
    return home + slash + (shlex.quote(rest) if rest else "")
