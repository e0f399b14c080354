"""Results as the memory instrument gives them, small enough to be added up by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.memory_results import MIB, PEAKS, make_tensors, make_timeline


@pytest.fixture(scope="session")
def make_memory_result(make_result: Callable[..., Any]) -> Callable[..., Any]:
    """A result of the memory instrument; `peak`: component -> MiB, `unattributed`: MiB beside them."""
    from dpscope.vocabulary.components import COMPONENTS

    def make(method: str = "standard", *, peak: dict[str, float] | None = None, unattributed: float = 8, **spec: Any):
        chosen = {**{component.key: 0 for component in COMPONENTS}, **(PEAKS[method] if peak is None else peak)}
        components = {key: round(mib * MIB) for key, mib in {**chosen, "unattributed": unattributed}.items()}
        total = sum(components.values())
        tracked = {key: count for key, count in components.items() if key != "unattributed"}
        memory = {
            "source": "tracker",
            "peak_bytes": total,
            "tracked_peak_bytes": sum(tracked.values()),
            "peak": {
                "phase": "backward",
                "operator": "aten::bmm",
                "module": "blocks.3.up",
                "components": components,
            },
            "modules": [{"module": f"blocks.{n}.up", "components": {"activations": (n + 1) * MIB}} for n in range(5)],
            "tensors": make_tensors(tracked),
            "unattributed": [{"what": "cuBLAS workspaces", "bytes": round(unattributed * MIB)}],
        }
        totals = {"total_allocated_mb": total / MIB, "peak_allocated_mb": total / MIB}
        stages = {"0_model_loaded": 100, "3_after_warmup": 300, "iter0_after_forward": 600}
        result = make_result(method=method, peak=total, **spec)
        return replace(
            result,
            spec={**result.spec, "instrument": "memory"},
            avg_time_ms=None,
            timing={},
            memory=memory,
            breakdown={**{f"{key}_mb": count / MIB for key, count in components.items()}, **totals},
            snapshots=[
                {"name": name, "allocated_mb": mb, "reserved_mb": mb, "timestamp": 1.0} for name, mb in stages.items()
            ],
            timeline=make_timeline(tracked),
        )

    return make


@pytest.fixture(scope="session")
def measured_both_ways(make_result: Callable[..., Any], make_memory_result: Callable[..., Any]) -> Callable[..., Any]:
    """Four methods at one size, each seen by the time instrument and by the memory instrument."""
    times = {"standard": 127.0, "flat": 256.0, "ghost": 347.0, "flash": 139.0}

    def make(**spec: Any) -> list[Any]:
        results = []
        for method, median in times.items():
            tracked = make_memory_result(method, **spec)
            timed = make_result(method=method, median=median, peak=tracked.memory["peak_bytes"], **spec)
            spread = {"p10_ms": 0.97 * median, "p90_ms": 1.05 * median}
            results += [replace(timed, timing={**timed.timing, **spread}), tracked]
        return results

    return make
