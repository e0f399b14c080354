"""GPUs as data: memory, compute capability, what they sustain, and where that is written."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Card:
    name: str
    memory_bytes: int
    capability: tuple[int, int]
    multiprocessors: int


H200 = Card("h200", 141 * 10**9, (9, 0), 132)
