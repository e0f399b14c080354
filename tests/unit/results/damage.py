"""Documents of results with one value replaced, or missing: what disks, editors and other programs leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Place = tuple[str | int, ...]
KEPT = 2  # items of each list, enough to damage one of them
GONE = object()


def shortened(value: Any) -> Any:
    """The same document with the first items of its lists: the others are alike, and take long to read."""
    if isinstance(value, dict):
        return {name: shortened(item) for name, item in value.items()}
    return [shortened(item) for item in value[:KEPT]] if isinstance(value, list) else value


def places_in(value: Any, place: Place = ()) -> Iterator[Place]:
    """Every place within a document, the whole first."""
    yield place
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places_in(item, (*place, key))


def damaged(document: Any, place: Place, damage: object) -> Any:
    """The document with another value in a place, or without it (`GONE`)."""
    if not place:
        return damage
    copy, (key, *below) = document.copy(), place
    if damage is GONE and not below:
        del copy[key]
    else:
        copy[key] = damaged(document[key], tuple(below), damage)
    return copy
