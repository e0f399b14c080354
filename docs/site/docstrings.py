"""Docstrings as this project writes them, in reStructuredText.

Indented blocks are code or mathematics, and lines such as `name   what it is` are a list of terms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

TERM = re.compile(r"(?P<term>\w[\w, ]*?) {2,}(?P<meaning>\S.*)")


def restructured(lines: list[str]) -> Iterator[str]:
    block = ""  # what the line before stood in: a "paragraph", "code", "terms", or nothing
    for line in lines:
        term = TERM.fullmatch(line)
        if term:
            if block != "terms":
                yield ""
            yield from (f"``{term['term']}``", f"    {term['meaning']}")
            block = "terms"
        elif line.startswith(" "):
            if not block:
                yield from ("::", "")
                block = "code"
            yield f"    {line.strip()}" if block == "terms" else line
        elif line:
            if block not in ("", "paragraph"):
                yield ""
            yield line
            block = "paragraph"
        else:
            yield line
            block = "code" if block == "code" else ""


def rewrite(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = restructured(list(lines))


def set_dashes(app: Sphinx, page: nodes.document) -> None:
    """Put a dash between an argument and its description, where Sphinx counts on smart quotes to do so."""
    for text in list(page.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" – "))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", rewrite)
    app.connect("doctree-read", set_dashes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
