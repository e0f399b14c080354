"""The guide to reading memory traffic, for `--guide`: docs/ncu-guide.md, which wheels carry beside this file."""

from __future__ import annotations

from pathlib import Path

NAME = "ncu-guide.md"


def guide_text() -> str:
    """Return the guide as Markdown, from the installed package or from the checkout it runs in."""
    here = Path(__file__)
    places = (here.with_name(NAME), here.parents[3] / "docs" / NAME)
    return next(place for place in places if place.is_file()).read_text(encoding="utf-8")
