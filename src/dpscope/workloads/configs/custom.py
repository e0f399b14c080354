"""The user's own workload: a function that returns a `dpscope.Workload`, named by where it is.

Nothing of the user's is imported here: the function is called in child processes, fresh in each.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, ClassVar

from dpscope.errors import UserError
from dpscope.places import parse_place
from dpscope.vocabulary.settings import flag_of
from dpscope.workloads.configs.base import WorkloadConfig

WORKLOAD_USAGE = "give --workload FILE.py:function or --workload package.module:function"


@dataclass(frozen=True, kw_only=True)
class CustomConfig(WorkloadConfig):
    """A function in a file, and the file's hash when the sweep was planned.

    The hash makes `--resume` measure again after the file was changed. Modules that it imports are ignored.
    """

    kind: ClassVar[str] = "custom"
    builder: ClassVar[str] = "dpscope.workloads.custom:build"

    file: str  # absolute
    function: str
    module: str | None = None  # its dotted name, where it belongs to a package
    sha256: str

    def resolve_seq_len(self, seq_len: int | None) -> int | None:
        return seq_len  # whether the function takes one is seen when it is loaded

    @property
    def import_root(self) -> Path:
        """The folder from which the file, or the package that it belongs to, is imported."""
        if self.module is None:
            return Path(self.file).parent
        depth = self.module.count(".") + (Path(self.file).name == "__init__.py")
        return Path(self.file).parents[depth]

    def resized(self, **sizes: Any) -> CustomConfig:
        if sizes:
            flags = ", ".join(map(flag_of, sorted(sizes)))
            raise UserError(f"{flags}: your workload decides its own sizes; these are for --model and --hf-config")
        return self


def workload_at(target: str) -> CustomConfig:
    """Return the workload at `FILE.py:function` or `package.module:function`."""
    place = parse_place(target)
    if place is None:
        raise UserError(f"--workload {target}: {WORKLOAD_USAGE}")
    source = place.source
    if place.is_file:
        file = Path(source)
        if not file.is_file():
            raise UserError(f"--workload {target}: there is no file {source}")
        if file.suffix != ".py":
            raise UserError(f"--workload {target}: {source} is not a Python file (.py); {WORKLOAD_USAGE}")
        return _config(file, place.name)
    file_of_module = _file_of_module(source)
    if file_of_module is None:
        raise UserError(
            f"--workload {target}: no module {source!r} in this folder or among the installed packages; "
            f"for a file {WORKLOAD_USAGE}"
        )
    return _config(file_of_module, place.name, module=source)


def workload_of(function: Callable[..., Any]) -> CustomConfig:
    """Return the config of a module-level function. A function of the running script is referred to by its file."""
    name = getattr(function, "__qualname__", "")
    code = getattr(function, "__code__", None)
    if code is None or not name.isidentifier():  # <lambda>, make.<locals>.inner, Class.method
        raise UserError(
            f"{name or function!r} cannot be found again by a child process: give a function at the top level of a "
            "file (no lambda, no method, none defined inside another), or the text 'FILE.py:function'"
        )
    file = Path(code.co_filename)
    if not file.is_file():
        raise UserError(
            f"{name} was typed in, not saved: child processes cannot find it. Put it in a file and give the text "
            "'FILE.py:function', or import it from there"
        )
    module = function.__module__
    return _config(file, name, module=module if "." in module else None)


def _config(file: Path, function: str, module: str | None = None) -> CustomConfig:
    file = file.resolve()
    return CustomConfig(
        name=f"{module or file.name}:{function}",
        file=str(file),
        function=function,
        module=module,
        sha256=file_hash(file),
    )


def file_hash(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None


def _file_of_module(name: str) -> Path | None:
    """Return the file of a module, without importing it or the packages around it."""
    where: list[str] | None = [str(Path.cwd()), *sys.path]
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        found = PathFinder.find_spec(".".join(parts[:depth]), where)
        if found is None:
            return None
        where = None if found.submodule_search_locations is None else list(found.submodule_search_locations)
        if where is None and depth < len(parts):
            return None
    return Path(found.origin) if found is not None and found.origin else None
