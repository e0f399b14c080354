"""Places: objects named as `FILE.py:function` or `package.module:function`, names of packages, paths in shared files.

Reports are sent around and must not reveal whose machine it was.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Place:
    source: str  # a file, or the dotted name of a module
    name: str

    @property
    def is_file(self) -> bool:
        return self.source.endswith(".py") or "/" in self.source

    def load(self) -> Any:
        module = load_file(Path(self.source)) if self.is_file else importlib.import_module(self.source)
        return getattr(module, self.name)

    def __str__(self) -> str:
        return f"{self.source}:{self.name}"


def parse_place(text: str) -> Place | None:
    """Parse the name of a place; None if it names none."""
    source, _, name = text.rpartition(":")
    return Place(source, name) if source and name.isidentifier() else None


def load_at(text: str) -> Any:
    """Load the object at a place named by dpscope or by a package's entry point."""
    place = parse_place(text)
    assert place is not None, text
    return place.load()


def names_at(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """Return a package's `__getattr__`, which loads a name when it is first used, and its `__all__`.

    `homes`: modules of the package, each with its public names.
    """
    home = {name: f"{package}.{module}" for module, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name]), name)

    return load, sorted(home)


def load_file(file: Path) -> ModuleType:
    """Return a file as a module under a name of its own, so that `if __name__ == "__main__"` is false."""
    name = f"dpscope_loaded_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module


PACKAGE = Path(__file__).parent  # the sources of dpscope
FOLDERS_OF_HOMES = (Path("/home"), Path("/Users"))
SOMEBODYS = (*FOLDERS_OF_HOMES, Path("/root"))


def is_own_source(file: str) -> bool:
    """Return whether a file is one of dpscope's; dpscope_experiments.py beside the package is not."""
    return file.startswith(f"{PACKAGE}{os.sep}")


def path_from(folder: Path, file: str) -> str:
    """Return a file's path relative to a folder: `../model.py`; `~/model.py` from outside the home directory.

    A path in another user's home, which a command typed here cannot use, is the file's name alone. Any other path
    stays as it is.
    """
    path = Path(file)
    if not path.is_absolute():
        return file
    folder = folder.resolve()
    if not _is_above_homes(Path(os.path.commonpath([folder, path]))):
        return os.path.relpath(path, folder)
    for home in _homes():
        if path.is_relative_to(home):
            return f"~/{path.relative_to(home)}"
    return path.name if any(path.is_relative_to(folder) for folder in SOMEBODYS) else file


@cache
def shorten_path(file: str) -> str:
    """Return the file of a code line, relative to the folder Python imports it from, or to the working folder."""
    if file.startswith("<"):
        return file
    path = Path(file)
    installed = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib", "platstdlib")]
    others = [PACKAGE.parent, Path.cwd(), *(Path(entry) for entry in sys.path if entry)]
    bases = [base for base in (*installed, *others) if base.is_absolute() and not _is_above_homes(base)]
    return next((path.relative_to(base).as_posix() for base in bases if path.is_relative_to(base)), path.name)


def _is_above_homes(folder: Path) -> bool:
    """Return whether a relative path from there would pass through a home directory."""
    return folder in (Path("/"), *FOLDERS_OF_HOMES) or any(
        folder != home and home.is_relative_to(folder) for home in _homes()
    )


def _homes() -> list[Path]:
    """Return the user's home directory, and its target if it is a link."""
    try:
        return list(dict.fromkeys((Path.home(), Path.home().resolve())))
    except RuntimeError:  # a user without one
        return []


def number_in(file: Path | str, pattern: str) -> int | None:
    """Return the whole number that a pattern finds in a file; None if it finds none, or there is no such file."""
    try:
        found = re.search(pattern, Path(file).read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
