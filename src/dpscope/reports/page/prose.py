"""Names of operators, kernels and modules in sentences: whole words, however long the name is."""

from __future__ import annotations

import re

LONGEST_IN_PROSE = 96  # characters
ARGUMENTS = re.compile(r"<[^<>]*>|\([^()]*\)")  # of templates and calls, innermost
LAST_WORD = re.compile(r"[\w:.~-]*$")


def in_prose(name: str) -> str:
    """The name itself. One that is too long loses its template arguments, and then whole words at its end."""
    plain = name.replace("autograd::engine::evaluate_function: ", "autograd: ")
    if len(plain) <= LONGEST_IN_PROSE:
        return plain
    while (shorter := ARGUMENTS.sub("", plain)) != plain:
        plain = shorter
    if len(plain) <= LONGEST_IN_PROSE:
        return plain
    kept = LAST_WORD.sub("", plain[:LONGEST_IN_PROSE])
    return f"{kept.rstrip()} …" if kept.strip() else plain
