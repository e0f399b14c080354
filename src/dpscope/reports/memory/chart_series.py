"""Components as the page's charts draw and name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dpscope.reports.figures.style import byte_unit, not_drawn
from dpscope.reports.memory.data import is_private_only, label_of
from dpscope.reports.palette import colour_of, is_dark
from dpscope.reports.tables import Row


def looks(keys: Iterable[str]) -> list[dict[str, Any]]:
    return [
        {
            "name": label_of(key),
            "label": label_of(key) + (" (private only)" if is_private_only(key) else ""),
            "colour": colour_of(key),
            "ink": "#ffffff" if is_dark(colour_of(key)) else "#000000",
            "hatched": is_private_only(key),
        }
        for key in keys
    ]


def unit_for(largest: float) -> dict[str, Any]:
    """What an axis is read in: ticks that are round numbers of bytes are not round in GiB."""
    size, name = byte_unit(largest)
    return {"size": size, "name": name}


def without(reasons: Sequence[tuple[Row, str]]) -> str:
    """The sentence that names the rows which a chart leaves out, to follow another."""
    return "".join(f" {note}." for note in not_drawn(reasons))
