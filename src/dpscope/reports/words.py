"""Names and sizes as people read them, in text and figures alike; and the columns that tell rows apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from rich.text import Text

from dpscope.plain_text import Column, Item
from dpscope.reports.tables import Row, heading_of, worth_a_column
from dpscope.units import MISSING
from dpscope.vocabulary.components import PEAK_SOURCES
from dpscope.vocabulary.settings import COMPARED

LONGEST_IN_PROSE = 96  # characters
ARGUMENTS = re.compile(r"<[^<>]*>|\([^()]*\)")  # of templates and calls, innermost
LAST_WORD = re.compile(r"[\w:.~-]*$")
AUTOGRAD_NODE = ("autograd::engine::evaluate_function: ", "autograd: ")  # as torch names it, and as reports do


def peak_notes(sources: Iterable[str]) -> list[str]:
    """Return what the peaks of a table are, a sentence for each way in which they were measured."""
    return [f"Peak memory: {PEAK_SOURCES[source]}." for source in dict.fromkeys(sources) if source in PEAK_SOURCES]


def spread_in_words(spread: tuple[float, float] | None) -> str:
    """Return `12.1–12.6`: 10th and 90th percentile in milliseconds."""
    return MISSING if spread is None else f"{spread[0]:.1f}–{spread[1]:.1f}"


def shorten(text: str, length: int) -> str:
    """Keep both ends of a long name: they are what tells modules apart."""
    if len(text) <= length:
        return text
    tail = (length - 1) // 2
    return f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"


def in_longest_order(lists: Iterable[Collection[str]]) -> list[str]:
    """Return every name of some lists once, in the order of the longest."""
    return list(dict.fromkeys(name for names in sorted(lists, key=len, reverse=True) for name in names))


def distinct(names: Sequence[str]) -> list[str]:
    """Add numbers to repeated names: `flat`, `flat (2)`."""
    return [name if name not in names[:n] else f"{name} ({names[:n].count(name) + 1})" for n, name in enumerate(names)]


def in_prose(name: str) -> str:
    """Return the name, shortened if it is too long: first its template arguments, then whole words at its end."""
    plain = name.replace(*AUTOGRAD_NODE)
    if len(plain) <= LONGEST_IN_PROSE:
        return plain
    while (shorter := ARGUMENTS.sub("", plain)) != plain:
        plain = shorter
    if len(plain) <= LONGEST_IN_PROSE:
        return plain
    kept = LAST_WORD.sub("", plain[:LONGEST_IN_PROSE])
    return f"{kept.rstrip()} …" if kept.strip() else plain


def operator_label(name: str, length: int) -> str:
    """Return a short label that still tells operators apart: autograd's nodes without the engine's prefix."""
    return shorten(name.replace(*AUTOGRAD_NODE), length)


LONGEST_METHOD = 24  # characters
NUMBERS = {"batch": 5, "seq": 3, "warmup": 6, "steps": 5}  # fields that are, and the least that their columns take


def identity_columns(
    rows: Sequence[Row], row_of: Callable[[Item], Row], more: Sequence[str] = ()
) -> list[Column[Item]]:
    """Return the fields that distinguish the rows of some items, long names shortened; `more`: further fields."""

    def column(name: str) -> Column[Item]:
        longest = LONGEST_METHOD if name == "method" else 10**6
        return heading_of(name), lambda item: Text(shorten(row_of(item).cell(name), longest))

    names = worth_a_column(rows, ("model", "method", "batch_size", "seq_len", *COMPARED, *more))
    return [column(name) for name in names]
