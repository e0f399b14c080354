"""Parts of sentences that name modules, parameters and methods, the same in every message."""

from __future__ import annotations

from collections.abc import Iterable


def name_module(name: str, module: object) -> str:
    """Return `blocks.0.attention (MultiheadAttention)`; the root's own name is empty."""
    return f"{name or 'the model itself'} ({type(module).__name__})"


def list_names(names: Iterable[str], most: int = 3) -> str:
    """Return `a, b, c and 2 more`."""
    shown = list(names)
    rest = len(shown) - most
    return ", ".join(shown[:most]) + (f" and {rest} more" if rest > 0 else "")


def group_names(said: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Group names by statement: pairs (name, statement) become statement -> `a, b`."""
    groups: dict[str, list[str]] = {}
    for name, what in said:
        groups.setdefault(what, []).append(name)
    return {what: ", ".join(names) for what, names in groups.items()}
