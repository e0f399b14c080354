"""Objects named by their place: `FILE.py:function` or `package.module:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
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
