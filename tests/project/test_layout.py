"""Tests lie where the code is, and helpers of tests are imported in one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests import ROOT
from tests.slow import SLOW

TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def home_of(test: Path) -> Path:
    """Where a test of `tests/unit/` belongs: `instruments/test_ncu_reading.py` into `instruments/ncu/`, a package."""
    folder = test.parent
    for part in test.stem.split("_")[1:-1]:
        if not package_of(folder / part).is_dir():
            break
        folder /= part
    return folder


def package_of(folder: Path) -> Path:
    return ROOT / "src" / "dpscope" / folder.relative_to(TESTS / "unit")


def imports_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_folder_is_a_package_so_that_helpers_have_whole_names():
    assert [folder for folder in {path.parent for path in FILES} if not (folder / "__init__.py").exists()] == []


def test_unit_tests_lie_in_the_mirror_of_the_folder_they_test():
    unit = [path for path in FILES if path.is_relative_to(TESTS / "unit") and path.name.startswith("test_")]
    assert [path for path in unit if not package_of(path.parent).is_dir()] == []
    assert {path: home_of(path) for path in unit if home_of(path) != path.parent} == {}


def test_what_tests_share_lies_in_a_module_that_is_no_test_and_no_conftest():
    def is_private(name: str) -> bool:
        return name.startswith("tests.") and any(part.startswith(("test_", "conftest")) for part in name.split("."))

    borrowing = {path: [name for name in imports_in(tree) if is_private(name)] for path, tree in trees().items()}
    assert {path: names for path, names in borrowing.items() if names} == {}


def test_no_test_changes_the_import_path_by_hand():
    changes = ("sys.path.insert", "sys.path.append", "sys.path.extend")
    calls = {
        path: [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for path, tree in trees().items()
    }
    assert [path for path, called in calls.items() if set(called) & set(changes)] == []


def test_every_place_that_is_listed_as_slow_is_there():
    assert [name for name in SLOW if not (TESTS / name).exists()] == []
