"""What each instrument adds to a result: the shape of its part of the file, as `TypedDict`s, one file an instrument.

A reader may take for granted what is declared here: `parse_result` holds every file against it.
"""

from __future__ import annotations

from typing import Any

from dpscope.results.payloads.memory import MemoryPayload, Snapshot, TimelinePayload, TimingPayload

# Part of a result -> its shape.
PAYLOADS: dict[str, Any] = {
    "timing": TimingPayload,
    "memory": MemoryPayload,
    "breakdown": dict[str, float],
    "snapshots": list[Snapshot],
    "timeline": TimelinePayload,
}
