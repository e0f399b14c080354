"""Errors and warnings are short, their links lead somewhere, and the page of sharp edges quotes them as they are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import ROOT

PACKAGE = ROOT / "src" / "dpscope"
LONGEST = 280  # characters without what is filled in: two sentences
# Quoted from several parts, or from torch and safetensors.
COMPOSED = {
    "runs sample by sample through torch.func.vmap",
    "Opacus's training of a sharded model on a CPU takes torch 2.11 or newer",
    "LBFGS calls its closure several times a step",
    "Some tensors share memory",
    "rank 1: the process was ended by SIGKILL",
}


def text_of(node: ast.AST) -> str:
    """Return a string as it is written, with … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ""


def strings(tree: ast.AST) -> list[str]:
    return [text for node in ast.walk(tree) if (text := text_of(node))]


def messages(tree: ast.AST) -> list[str]:
    """Return the texts of errors that are made and warnings that are given."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    return [text_of(call.args[0]) for call in calls if re.search(r"Error$|warn$", ast.unparse(call.func))]


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.AST]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


@pytest.fixture(scope="module")
def said(trees: dict[Path, ast.AST]) -> str:
    """Every string of the package."""
    return " ".join(" ".join(strings(tree)) for tree in trees.values())


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_message_is_a_sentence_of_cause_and_one_of_remedy(trees):
    told = {path.name: [text for text in messages(tree) if len(text) > LONGEST] for path, tree in trees.items()}
    assert {name: texts for name, texts in told.items() if texts} == {}


def test_a_link_in_a_message_leads_to_a_section(said):
    links = set(re.findall(r"docs/[\w-]+\.md(?:#[\w-]+)?", said))
    split = {link: link.partition("#") for link in links}
    assert len(links) > 10
    assert [link for link, (page, _, anchor) in split.items() if anchor and anchor not in anchors(ROOT / page)] == []


def test_the_page_of_sharp_edges_quotes_messages_as_they_are(said):
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "sharp-edges.md").read_text(encoding="utf-8"), re.MULTILINE)
    quotes = {quote for row in rows for quote in re.findall(r'"([^"]{8,})"', row)} - COMPOSED
    parts = {part.strip() for quote in quotes for part in re.split(r"…|\bN\b|\d[\d.]*:?", quote)}
    assert len(quotes) > 20
    assert {part for part in parts if len(part) > 4 and part not in said} == set()
