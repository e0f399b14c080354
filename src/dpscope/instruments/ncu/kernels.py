"""Kernels that moved the bytes: launches added up by kernel and phase, the largest first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dpscope.instruments.families import kernel_family, short_kernel_name
from dpscope.instruments.ncu.metrics import GPU_TIME, TRAFFIC_FORMULAS, make_figures, make_flops
from dpscope.instruments.ncu.reading import Action
from dpscope.instruments.sums import FigureRow
from dpscope.results.payloads.ncu import KERNEL_FIGURES, Kernels

# Caches are left as they are: what a kernel has written may leave L2 only while a later one runs.
CACHED = "DRAM writes count for the kernel during which they leave L2"
TENSOR_ONLY = "operations are those of the tensor cores"


def describe_kernels(actions: Sequence[Action], *, top: int, kernel: str = "") -> Kernels:
    """Return the kernels of a step as a result holds them; the number of launches is counted without ncu."""
    only = [f"only kernels matching {kernel!r} were counted"] if kernel else []
    no_phases = ["no NVTX ranges in the report: phases are unknown"] if not any(a.phase for a in actions) else []
    note = "; ".join([*only, *no_phases, CACHED, TENSOR_ONLY])
    return {"rows": keep_top(kernel_rows(actions), top), "calls_seen": len(actions), "calls_total": None, "note": note}


def kernel_rows(actions: Iterable[Action]) -> list[Any]:
    """Return a row for each kernel in each phase, those that move the most DRAM bytes first."""
    return _add_up(map(_row, actions))


def keep_top(rows: Sequence[Any], top: int) -> list[Any]:
    """Return the first `top` rows, and the rest added up by family and phase, so that sums stay whole."""
    return [*rows[:top], *_add_up({**row, "name": "others"} for row in rows[top:])]


def _row(action: Action) -> FigureRow:
    figures, _ = make_figures(
        action.metrics, {name: TRAFFIC_FORMULAS[name] for name in KERNEL_FIGURES if name in TRAFFIC_FORMULAS}
    )
    family = kernel_family(action.name, action.phase)
    row: FigureRow = {
        "name": short_kernel_name(action.name),
        "family": family,
        "phase": action.phase,
        "calls": 1,
        **figures,
    }
    if flops := make_flops(action.metrics):
        row["flops"] = flops.get("total", sum(flops.values()))
    if GPU_TIME in action.metrics:
        row["time_ns"] = round(action.metrics[GPU_TIME])
    return row


def _add_up(rows: Iterable[FigureRow]) -> list[FigureRow]:
    """Add up the rows of one name, family and phase. A figure that one of them lacks is left out of the sum."""
    groups: dict[tuple[Any, ...], list[FigureRow]] = {}
    for row in rows:
        groups.setdefault((row["name"], row["family"], row["phase"]), []).append(row)
    added = [
        {"name": name, "family": family, "phase": phase}
        | {figure: sum(row[figure] for row in same) for figure in KERNEL_FIGURES if all(figure in row for row in same)}
        for (name, family, phase), same in groups.items()
    ]
    return sorted(added, key=lambda row: row.get("dram_read_bytes", 0) + row.get("dram_write_bytes", 0), reverse=True)


def add_up_metrics(actions: Iterable[Action]) -> dict[str, float]:
    """Add up the raw counts of several ranges or kernels; rates and shares cannot be added and are left out."""
    total: dict[str, float] = defaultdict(float)
    for action in actions:
        for name, value in action.metrics.items():
            if name.endswith(".sum"):
                total[name] += value
    return dict(total)


def count_launches(step: Callable[[], object]) -> int | None:
    """Count the kernels (no copies, no fills) of one step without ncu; None if torch.profiler sees none."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        events = [event.name for event in profiler.events() or () if event.device_type.name == "CUDA"]
    except (RuntimeError, AttributeError):
        return None
    return sum(not name.startswith(("Memcpy", "Memset")) for name in events) or None
