"""Instruments that can work on this machine: what `--all` and `instruments="all"` stand for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dpscope.runner.measure import measurement_module
from dpscope.vocabulary.instruments import INSTRUMENTS

ALL = "all"


@dataclass(frozen=True)
class Choice:
    """Instruments, and a sentence for each that is left out or cannot do all it could."""

    instruments: tuple[str, ...]
    remarks: list[str] = field(default_factory=list)
    named: bool = True  # one by one; not as "all"


def choose_instruments(asked: str | Iterable[str], device: str) -> Choice:
    """Return the instruments of a sweep: as asked for, by name or as `time,memory`, or `all` that can work here."""
    names = [name.strip() for name in asked.split(",")] if isinstance(asked, str) else list(asked)
    if ALL not in names:
        return Choice(tuple(names))
    obstacles = {name: _obstacle(name, device) for name in INSTRUMENTS}
    left_out = {name for name, why in obstacles.items() if why and not INSTRUMENTS[name].instead}
    remarks = [
        f"{name} is left out: {why}" if name in left_out else f"{name}: {INSTRUMENTS[name].instead}: {why}"
        for name, why in obstacles.items()
        if why
    ]
    return Choice(tuple(name for name in INSTRUMENTS if name not in left_out), remarks, named=False)


def _obstacle(name: str, device: str) -> str | None:
    """Return why an instrument cannot work on a device of this machine; None if it can."""
    if INSTRUMENTS[name].works_everywhere:
        return None
    why: str | None = measurement_module(name).obstacle(device)
    return why
