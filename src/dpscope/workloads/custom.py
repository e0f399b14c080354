"""The user's own workload, loaded from where it is. Runs in child processes only."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpscope.errors import UserError
from dpscope.places import load_file
from dpscope.workloads.configs.custom import CustomConfig, file_hash
from dpscope.workloads.workload import Workload


def build(config: CustomConfig, *, batch_size: int, seq_len: int | None) -> Workload:
    """Call the user's function, with the batch size and the sequence length if it takes them."""
    if file_hash(Path(config.file)) != config.sha256:
        raise UserError(f"{config.file} was changed while its rows were measured: start the sweep again")
    function = load_function(config)
    workload = function(**_arguments(config, function, batch_size=batch_size, seq_len=seq_len))
    if not isinstance(workload, Workload):
        raise UserError(
            f"{config.name} must return a dpscope.Workload(model=…, batch=…, loss=…), but it returned "
            f"{_describe(workload)}"
        )
    return workload


def load_function(config: CustomConfig) -> Callable[..., Any]:
    # As `python FILE.py` would, so that it can import its neighbours.
    if str(config.import_root) not in sys.path:
        sys.path.insert(0, str(config.import_root))
    module = load_file(Path(config.file)) if config.module is None else importlib.import_module(config.module)
    function = getattr(module, config.function, None)
    if function is None:
        own = (name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_"))
        raise UserError(f"{config.file} has no function {config.function!r}; it has {', '.join(own) or 'none'}")
    if not callable(function):
        raise UserError(f"{config.name} is {_describe(function)}, not a function that returns a dpscope.Workload")
    found: Callable[..., Any] = function
    return found


def _arguments(
    config: CustomConfig, function: Callable[..., Any], *, batch_size: int, seq_len: int | None
) -> dict[str, int]:
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    known = {"batch_size": batch_size, "seq_len": seq_len}
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if strange := [name for name in needed if name not in known]:
        raise UserError(
            f"{config.name} asks for {', '.join(strange)}: a workload's function takes batch_size and seq_len, or "
            "neither"
        )
    if seq_len is not None and "seq_len" not in parameters and not takes_all:
        raise UserError(f"{config.name} takes no seq_len: add it to the function's arguments, or leave out --seq-len")
    if seq_len is None and "seq_len" in needed:
        raise UserError(f"{config.name} needs a sequence length: give --seq-len")
    return {name: value for name, value in known.items() if value is not None and (takes_all or name in parameters)}


def _describe(value: object) -> str:
    return "nothing (is a `return` missing?)" if value is None else f"{type(value).__name__} {value!r:.60}"
