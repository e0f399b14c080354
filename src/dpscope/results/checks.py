"""Conservation: what a memory result says of components adds up to its totals, to the byte."""

from __future__ import annotations

from collections.abc import Sequence

from dpscope.results.schema import Result


class NotConserved(AssertionError):
    """Bytes were counted twice or lost: the figures of this result mean nothing."""


def require_conserved(points: Sequence[Sequence[int]], totals: Sequence[int]) -> None:
    """Raise unless the components add up to the live total at every point, and none is negative."""
    if len(points) != len(totals):
        raise NotConserved(f"{len(points)} points of components, {len(totals)} totals")
    for event, (point, total) in enumerate(zip(points, totals, strict=True)):
        if sum(point) != total or min(point) < 0:
            raise NotConserved(f"event {event}: components {list(point)} do not add up to {total} live bytes")


def conservation_faults(result: Result) -> list[str]:
    """Return what does not add up in a result of the memory instrument, a sentence each; empty if all does."""
    memory, timeline = result.memory, result.timeline
    parts = memory["peak"]["components"]
    tracked = sum(amount for key, amount in parts.items() if key != "unattributed")
    by_module = sum(sum(row["components"].values()) for row in memory["modules"])
    tensors = memory["tensors"]
    by_tensor = sum(each["bytes"] * each["count"] for each in tensors["largest"]) + tensors["rest"]["bytes"]
    explained = sum(item["bytes"] for item in memory["unattributed"])
    breakdown = sum(value for key, value in result.breakdown.items() if key.removesuffix("_mb") in parts)
    drawn = sum(timeline["points"][timeline["peak"]][1:])
    highest = max(sum(point[1:]) for point in timeline["points"])
    claims = (
        ("components at the peak and the peak", sum(parts.values()), memory["peak_bytes"]),
        ("tracked components and the tracked peak", tracked, memory["tracked_peak_bytes"]),
        ("modules at the peak and the tracked peak", by_module, memory["tracked_peak_bytes"]),
        ("tensors at the peak and the tracked peak", by_tensor, memory["tracked_peak_bytes"]),
        ("the timeline's peak and the tracked peak", drawn, memory["tracked_peak_bytes"]),
        ("the timeline's highest point and the tracked peak", highest, memory["tracked_peak_bytes"]),
        ("what explains unattributed and unattributed", explained, parts["unattributed"]),
        ("breakdown and peak, rounded to bytes", round(breakdown * 2**20), memory["peak_bytes"]),
    )
    return [f"{what}: {left} against {right} bytes" for what, left, right in claims if left != right]
