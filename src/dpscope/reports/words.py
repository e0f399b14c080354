"""Names and sizes as people read them, in text and figures alike."""

from __future__ import annotations

from typing import Any


def size_in_words(spec: dict[str, Any]) -> str:
    """`batch 8, sequence 1024`; images have no sequence."""
    length = spec.get("seq_len")
    return f"batch {spec['batch_size']}" + (f", sequence {length}" if length else "")


def shorten(text: str, length: int) -> str:
    """Both ends of a long name: they are what tells modules apart."""
    if len(text) <= length:
        return text
    tail = (length - 1) // 2
    return f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"
