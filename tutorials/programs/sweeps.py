"""Sweeps of `dpscope compare` on an NVIDIA H200, by short names: for the lessons and for the check of their prose."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from dpscope import Comparison
from dpscope.reports.memory.text import composition_of
from dpscope.reports.tables import Row

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DAY = "2026-11-15"


@cache
def sweep(name: str, day: str = DAY) -> Comparison:
    """Return a sweep by its short name: `page`, `traffic`, `flash-grid/bf16-1024`."""
    return Comparison.read(RESULTS / f"{day}-h200-{name}")


def row(name: str, method: str, batch: int = 8, seq: int | None = 1024, model: str = "1b") -> Row:
    """Return one method at one size of a sweep."""
    wanted = (method, batch, seq, model)
    for each in sweep(name).rows:
        if (each.method, each.spec["batch_size"], each.spec.get("seq_len"), each.field("model")) == wanted:
            return each
    raise LookupError(f"no {wanted} in {name}")


def ms(*which: Any, **more: Any) -> float:
    """Return the milliseconds of a step, the median."""
    return there(row(*which, **more).median_ms)


def times(*which: Any, **more: Any) -> float:
    """Return the time as a multiple of standard's."""
    return there(row(*which, **more).time_ratio)


def gib(*which: Any, **more: Any) -> float:
    """Return the peak memory in GiB."""
    return there(row(*which, **more).peak_bytes) / 2**30


def memory_times(*which: Any, **more: Any) -> float:
    """Return the peak memory as a multiple of standard's."""
    return there(row(*which, **more).memory_ratio)


def component_gib(component: str, *which: Any, **more: Any) -> float:
    """Return a component of the peak, in GiB."""
    return there(composition_of(row(*which, **more))).components.get(component, 0) / 2**30


def dram_gb(*which: Any, **more: Any) -> float:
    """Return the bytes that a step reads from and writes to DRAM, in GB (10⁹)."""
    seen = there(row(*which, **more).measured["ncu"].ncu)["traffic"]
    return (seen["dram_read_bytes"] + seen["dram_write_bytes"]) / 1e9


def dram_times(name: str, method: str, *size: int) -> float:
    """Return the DRAM bytes as a multiple of standard's."""
    return dram_gb(name, method, *size) / dram_gb(name, "standard", *size)


def traced(name: str, method: str, *size: int) -> dict[str, Any]:
    """Return what torch.profiler saw of a step."""
    return there(row(name, method, *size).measured["trace"].trace)


def captured(name: str, method: str, *size: int) -> dict[str, Any]:
    """Return what Nsight Systems saw of a step."""
    return there(row(name, method, *size).measured["nsys"].nsys)


def ceilings(name: str = "traffic") -> dict[str, Any]:
    """Return what the H200 reaches at its best: bytes and operations a second."""
    counted = [each.measured["ncu"].ncu for each in sweep(name).rows if "ncu" in each.measured]
    return next(dict(seen["ceilings"]) for seen in counted if seen and seen.get("ceilings"))


def there(value: Any) -> Any:
    """Return a value that was measured; raise LookupError if it was not."""
    if value is None:
        raise LookupError("it was not measured")
    return value
