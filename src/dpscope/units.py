"""Units, defined once: bytes are stored, MiB go into `_mb` keys, GiB/MiB and ms/s are what people read."""

KIB = 2**10
MIB = 2**20
GIB = 2**30

MISSING = "—"


def mib(count: float) -> float:
    """Bytes to MiB (1 MB = 2^20 bytes in every `_mb` key)."""
    return count / MIB


def format_bytes(count: float | None) -> str:
    if count is None:
        return MISSING
    if abs(count) >= GIB - MIB / 20:
        return f"{count / GIB:.2f} GiB"
    if abs(count) >= MIB / 20 or not count:
        return f"{count / MIB:.1f} MiB"
    return f"{count / KIB:.1f} KiB" if abs(count) >= KIB else f"{count:.0f} B"


def format_ms(milliseconds: float | None) -> str:
    if milliseconds is None:
        return MISSING
    return f"{milliseconds / 1e3:.2f} s" if milliseconds >= 10_000 else f"{milliseconds:.1f} ms"


def format_ratio(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{ratio:.2f}×"


def format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
