"""What results over several processes hold of their ranks: two that were measured, and one of a simulated world."""

from __future__ import annotations

GATHERED = {"all-gather": {"calls": 9, "bytes": 8 << 20, "sent_bytes": 4 << 20}}
MEASURED = {
    "simulated": False,
    "time_ms": [30.0, 40.0],
    "peak_bytes": [5 << 20, 3 << 20],
    "collectives": {"reduce-scatter": {"calls": 5, "bytes": 2 << 20, "sent_bytes": 1 << 20}, **GATHERED},
    "collective_share": [0.5, 0.25],
}
SIMULATED = {
    "simulated": True,
    "time_ms": [40.0],
    "peak_bytes": [3 << 20],
    "collectives": GATHERED,
    "link": {"gbps": 100.0, "send_ms": 10.0},
}
