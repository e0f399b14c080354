"""Units, and parts of sentences that name things: defined once, the same in every message and report."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

KIB = 2**10
MIB = 2**20
GIB = 2**30

MISSING = "—"


def mib(count: float) -> float:
    """Convert bytes to MiB (1 MB = 2^20 bytes in every `_mb` key)."""
    return count / MIB


def format_bytes(count: float | None) -> str:
    if count is None:
        return MISSING
    if abs(count) >= GIB - MIB / 20:
        return f"{count / GIB:.2f} GiB"
    if abs(count) >= MIB / 20 or not count:
        return f"{count / MIB:.1f} MiB"
    return f"{count / KIB:.1f} KiB" if abs(count) >= KIB else f"{count:.0f} B"


def three_digits(value: float) -> str:
    """Format the digits worth showing: 4.38, 87.2, 1234."""
    return f"{value:.{0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2}f}"


def format_traffic(count: float | None) -> str:
    """Format moved bytes in decimal units, like bandwidths."""
    return MISSING if count is None else _decimal(count, "B")


def format_rate(per_second: float | None, unit: str = "B") -> str:
    """Format a rate: 1.92 TB/s; with another unit, 624 TFLOP/s."""
    return MISSING if per_second is None else _decimal(per_second, unit) + "/s"


def _decimal(value: float, unit: str) -> str:
    """Format three digits and a prefix: 168 GB, 1.14 GB, 35.0 MB."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) / size >= 0.9995:
            return f"{three_digits(value / size)} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def format_throughput(per_second: float | None) -> str:
    """Format samples or tokens a second: three digits or whole numbers, 4.38, 87.2, 1,234, 2.51 M."""
    if per_second is None:
        return MISSING
    if per_second >= 999_999.5:
        return f"{per_second / 1e6:.2f} M" if per_second < 1e8 else f"{per_second / 1e6:,.0f} M"
    return three_digits(per_second) if per_second < 99.95 else f"{per_second:,.0f}"


def format_ms(milliseconds: float | None) -> str:
    if milliseconds is None:
        return MISSING
    return f"{milliseconds / 1e3:.2f} s" if milliseconds >= 10_000 else f"{milliseconds:.1f} ms"


def format_ratio(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{ratio:.2f}×"


def format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


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


def spread_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the 10th and the 90th percentile."""
    several = values if len(values) > 1 else [*values, *values]  # `quantiles` wants two
    deciles = statistics.quantiles(several, n=10, method="inclusive")
    return deciles[0], deciles[-1]
