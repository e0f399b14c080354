"""A name says one thing: constants and classes of the package are called alike in one file only."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests import ROOT

PACKAGE = ROOT / "src" / "dpscope"
# Called alike because they are alike: each file says of its own kernels, presets, batch or type variable what it is.
ALIKE = {"SMALL", "PRESETS", "Batch", "Key", "F", "Item", "Value"}


def names_defined_in(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))


def test_no_constant_or_class_has_the_name_of_another_file_s():
    files = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for name in names_defined_in(ast.parse(path.read_text(encoding="utf-8"))):
            if not name.startswith("_") and name not in ALIKE:
                files[name].add(str(path.relative_to(PACKAGE)))
    assert {name: sorted(found) for name, found in files.items() if len(found) > 1} == {}
