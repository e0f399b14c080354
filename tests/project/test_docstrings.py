"""Docstrings begin with a verb or with what they name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import ROOT

PACKAGE = ROOT / "src" / "dpscope"
LENIENT = ("flash",)  # functions there may begin with a noun until all are rewritten
VAGUE = {"Of", "That", "Those", "As", "What", "Whether", "Which", "Whose"}
# Words that a noun phrase or a clause begins with: a function is described by a verb.
NO_VERBS = {"The", "A", "An", "Its", "This", "One", "Two", "Every", "Each", "All", "None", "Nothing", "Everything"}
NO_VERBS |= {
    "How",
    "Why",
    "Where",
    "When",
    "If",
    "Is",
    "Are",
    "Was",
    "Does",
    "Did",
    "From",
    "In",
    "At",
    "By",
    "For",
    "To",
}
Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def definitions(file: Path) -> list[Definition]:
    return [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, Definition)]


def is_property(node: Definition) -> bool:
    return any("property" in ast.unparse(each) for each in getattr(node, "decorator_list", []))


def fault(node: Definition, *, strict: bool = True) -> str | None:
    """Return what is wrong with how a docstring begins."""
    text = ast.get_docstring(node)
    if not text:
        return None
    word = re.split(r"[\s,:;.]", text)[0]
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node)
    if word in VAGUE or (strict and is_function and word in NO_VERBS):
        return f"{getattr(node, 'name', 'the module')}: {text.splitlines()[0]}"
    return None


def test_docstrings_begin_with_a_verb_or_a_noun():
    found = {}
    for file in PACKAGE.rglob("*.py"):
        strict = file.relative_to(PACKAGE).parts[0] not in LENIENT
        found[str(file.relative_to(ROOT))] = [f for node in definitions(file) if (f := fault(node, strict=strict))]
    assert {file: faults for file, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    ("code", "is_wrong"),
    [
        ('def f():\n    """What it gives."""', True),
        ('def f():\n    """The rows."""', True),
        ('def f():\n    """Return the rows."""', False),
        ('class C:\n    """That of a row."""', True),
        ('class C:\n    """The rows of a table."""', False),
        ('class C:\n    @property\n    def f(self):\n        """The rows."""', False),
        ('"""Whose it is."""', True),
    ],
)
def test_a_vague_beginning_is_found(code, is_wrong):
    found = [fault(node) for node in ast.walk(ast.parse(code)) if isinstance(node, Definition)]
    assert any(found) is is_wrong
