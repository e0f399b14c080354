"""A component rule of the user's own, by where it is: `FILE.py:function` or `package.module:function`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpscope.errors import UserError
from dpscope.places import Place, parse_place


def resolve_rule(where: str) -> str:
    """Return the place with its file's absolute path, for a child process."""
    place = _place_of(where)
    if not place.is_file:
        return where
    file = Path(place.source)
    if not file.is_file():
        raise UserError(f"--rule {where!r}: there is no file {place.source}")
    return str(Place(str(file.resolve()), place.name))


def load_rule(where: str) -> Callable[[Any], str | None]:
    place = _place_of(where)
    try:
        rule: Callable[[Any], str | None] = place.load()
    except FileNotFoundError:
        raise UserError(f"--rule {where!r}: there is no file {place.source}") from None
    except ModuleNotFoundError as error:
        raise UserError(f"--rule {where!r}: there is no module {error.name!r}") from None
    except AttributeError:
        raise UserError(f"--rule {where!r}: {place.source} has no {place.name!r}") from None
    if not callable(rule):
        raise UserError(f"--rule {where!r}: {place.name} is not a function")
    return rule


def _place_of(where: str) -> Place:
    place = parse_place(where)
    if place is None:
        raise UserError(f"--rule {where!r}: expected FILE.py:function or package.module:function")
    return place
