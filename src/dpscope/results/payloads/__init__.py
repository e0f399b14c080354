"""Parts of a result that each instrument adds, as `TypedDict`s, one file an instrument.

Readers can rely on what is declared here: `parse_result` checks every row that is ok against it. A row that failed
holds what was measured before the failure.
"""

from __future__ import annotations

from typing import Any

from dpscope.results.payloads.memory import MemoryPayload, RanksPayload, Snapshot, TimelinePayload, TimingPayload
from dpscope.results.payloads.ncu import NcuPayload
from dpscope.results.payloads.trace import NsysPayload, TracePayload

# Part of a result -> its shape in a row that is ok.
PAYLOADS: dict[str, Any] = {
    "timing": TimingPayload,
    "memory": MemoryPayload,
    "breakdown": dict[str, float],
    "snapshots": list[Snapshot],
    "timeline": TimelinePayload,
    "trace": TracePayload,
    "ncu": NcuPayload,
    "nsys": NsysPayload,
    "ranks": RanksPayload,
}
