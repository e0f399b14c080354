"""Spelling of flags: what Python and result files call `batch_size`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flag_of(name: str) -> str:
    """Return `--batch-size`."""
    return f"--{name.replace('_', '-')}"


def flags_of(values: Mapping[str, Any]) -> list[str]:
    """Return `--batch-size 8`; a switch that is on has no value. Numbers are written in full."""
    return [
        word for name, value in values.items() for word in (flag_of(name), *([] if value is True else [str(value)]))
    ]
