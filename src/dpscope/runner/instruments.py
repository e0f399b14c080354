"""Which instruments can work on this machine: what `--all` and `instruments="all"` stand for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dpscope.instruments.ncu import failures as ncu_failures
from dpscope.instruments.ncu.command import find_ncu
from dpscope.instruments.nsys import failures as nsys_failures
from dpscope.instruments.nsys.finding import find_nsys
from dpscope.runner.spec import INSTRUMENTS

ALL = "all"


@dataclass(frozen=True)
class Choice:
    """Instruments, and a sentence for each that is left out or cannot do all it could."""

    instruments: tuple[str, ...]
    remarks: list[str] = field(default_factory=list)


def choose_instruments(asked: str | Iterable[str], device: str) -> Choice:
    """The instruments of a sweep: as asked for, by name or as `time,memory`, or `all` that can work here."""
    names = [name.strip() for name in asked.split(",")] if isinstance(asked, str) else list(asked)
    if ALL not in names:
        return Choice(tuple(names))
    remarks = []
    left_out = set()
    if why := _not_counted(device):
        remarks.append(f"ncu: bytes are estimated from tensor sizes, not counted: {why}")
    if why := _no_timeline(device):
        left_out.add("nsys")
        remarks.append(f"nsys is left out: {why}")
    return Choice(tuple(name for name in INSTRUMENTS if name not in left_out), remarks)


def _not_counted(device: str) -> str | None:
    if device != "cuda":
        return ncu_failures.NO_GPU
    return None if find_ncu() else ncu_failures.NO_NCU


def _no_timeline(device: str) -> str | None:
    if device != "cuda":
        return nsys_failures.NO_GPU
    return None if find_nsys() else nsys_failures.NO_NSYS
