"""Scripts, examples and benchmarks import names of the package that are there: few of them run in tests."""

from __future__ import annotations

import ast
import importlib
import importlib.util

import pytest

from tests import ROOT

FOLDERS = ("benchmarks", "examples", "scripts", "tutorials")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def is_there(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_a_file_beside_the_package_imports_from_it_is_there(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    wanted = [(node.module, alias.name) for node in imports for alias in node.names if node.module]
    ours = [(module, name) for module, name in wanted if module.split(".")[0] == "dpscope"]
    assert [(module, name) for module, name in ours if not is_there(module, name)] == []
