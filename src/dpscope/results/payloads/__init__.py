"""What each instrument adds to a result: the shape of its part of the file, as `TypedDict`s, one file an instrument.

A reader may take for granted what is declared here: `parse_result` holds every file against it.
"""

from __future__ import annotations

PAYLOADS: dict[str, type] = {}  # part of a result -> its shape
