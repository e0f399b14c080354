"""Docstrings begin with a verb or with what they name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import ROOT

PACKAGE = ROOT / "src" / "dpscope"
VAGUE = {"Of", "That", "Those", "As", "What", "Whether", "Which", "Whose"}
# Words that a noun phrase or a clause begins with: a function is described by a verb.
NO_VERB = re.compile(
    "The|An?|Its|This|These|One|Two|Every|Each|All|Some|None|Nothing|Everything|Another|Other|First|Half|Equal|Known|"
    "How|Why|Where|When|If|Is|Are|Was|Does|Did|From|In|Inside|At|By|For|To|On|Afterwards|Tell|Say|Backward|Forward"
)
# A verb is one plain word; one that ends in a single s is a plural.
PLAIN_WORD = re.compile("[A-Z][a-z]*([a-rt-z]|ss)")
Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def definitions(file: Path) -> list[Definition]:
    return [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, Definition)]


def is_property(node: Definition) -> bool:
    return any("property" in ast.unparse(each) for each in getattr(node, "decorator_list", []))


def fault(node: Definition) -> str | None:
    """Return what is wrong with how a docstring begins."""
    text = ast.get_docstring(node)
    if not text:
        return None
    word = re.split(r"[\s,:;.]", text)[0]
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node)
    if word in VAGUE or (is_function and (NO_VERB.fullmatch(word) or not PLAIN_WORD.fullmatch(word))):
        return f"{getattr(node, 'name', 'the module')}: {text.splitlines()[0]}"
    return None


def test_docstrings_begin_with_a_verb_or_a_noun():
    found = {}
    for file in PACKAGE.rglob("*.py"):
        found[str(file.relative_to(ROOT))] = [f for node in definitions(file) if (f := fault(node))]
    assert {file: faults for file, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    ("code", "is_wrong"),
    [
        ('def f():\n    """What it gives."""', True),
        ('def f():\n    """The rows."""', True),
        ('def f():\n    """Rows of a table."""', True),
        ('def f():\n    """`rows` of a table."""', True),
        ('def f():\n    """Inside, there are rows."""', True),
        ('def f():\n    """Return the rows."""', False),
        ('def f():\n    """Process the rows."""', False),
        ('class C:\n    """That of a row."""', True),
        ('class C:\n    """The rows of a table."""', False),
        ('class C:\n    @property\n    def f(self):\n        """The rows."""', False),
        ('"""Whose it is."""', True),
    ],
)
def test_a_vague_beginning_is_found(code, is_wrong):
    found = [fault(node) for node in ast.walk(ast.parse(code)) if isinstance(node, Definition)]
    assert any(found) is is_wrong
