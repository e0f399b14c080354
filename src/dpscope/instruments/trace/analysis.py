"""Analyses for people who work in Python: data frames first, printing second.

Every function takes a profiler that has recorded something (`torch.profiler.profile`), a trace that was read, or the
path of one. Times are in milliseconds, memory in bytes. `device` is the GPU: CPU traces have no such columns.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import profile

from dpscope.errors import UserError
from dpscope.instruments.trace.capture import trace_from_profiler
from dpscope.instruments.trace.events import OPERATOR, Event, Trace, read_trace

if TYPE_CHECKING:
    from pandas import DataFrame

Source = profile | Trace | Path | str

CPU_COLUMNS = ("cpu_ms", "self_cpu_ms")
DEVICE_COLUMNS = ("device_ms", "self_device_ms")
BYTE_COLUMNS = ("self_cpu_bytes", "self_gpu_bytes")
PRINTED_ROWS = 40  # rows of a table that are printed


@dataclass(frozen=True)
class Analysis:
    """Tables and totals. `analysis["by operator"]` is a data frame."""

    title: str
    tables: dict[str, DataFrame]
    totals: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> DataFrame:
        return self.tables[name]

    def shown(self, show: bool) -> Analysis:
        """Print it, if asked for."""
        if show:
            print(self)
        return self

    def __str__(self) -> str:
        lines = [self.title, "=" * len(self.title)]
        for name, table in self.tables.items():
            shown = table.head(PRINTED_ROWS).to_string(index=False, float_format="{:.3f}".format, na_rep="")
            lines += ["", f"{name}:", shown if len(table) else "(nothing)"]
            lines += [f"… and {len(table) - PRINTED_ROWS} more rows"] if len(table) > PRINTED_ROWS else []
        if self.totals:
            lines += ["", "totals:", *(f"  {name}: {value:,.10g}" for name, value in self.totals.items())]
        return "\n".join(lines)


@dataclass(frozen=True)
class Bottleneck:
    """An operator that takes longer than a threshold, with all that it calls."""

    name: str
    cpu_ms: float
    device_ms: float
    count: int
    input_shapes: list[str]  # those seen, where shapes were recorded


def as_trace(source: Source) -> Trace:
    """Return the trace of a profiler, a file, or a trace itself."""
    if isinstance(source, Trace):
        return source
    if isinstance(source, profile):
        return trace_from_profiler(source)
    return read_trace(source)


def operator_table(source: Source, *, by_shape: bool = False) -> DataFrame:
    """Return a row an operator (and input shape): calls, time with and without what it calls, memory it keeps."""
    import pandas as pd

    trace = as_trace(source)

    def operators_around(event: Event) -> list[Event]:
        return [around for around in event.ancestors() if around.category == OPERATOR]

    def row(event: Event, **figures: float) -> dict[str, Any]:
        return {"operator": event.name, "input_shapes": _shape(event) if by_shape else "", **figures}

    rows = []
    for event in trace.operators:
        recursive = event.name in {around.name for around in operators_around(event)}  # whose time includes it
        cpu_ms = 0.0 if recursive else event.duration / 1e3
        rows.append(row(event, calls=1, self_cpu_ms=event.self_time / 1e3, cpu_ms=cpu_ms))
    for work in trace.device_work:
        operator, ms = trace.operator_of(work), work.duration / 1e3
        if operator is not None:
            rows.append(row(operator, self_device_ms=ms))
            distinct = {each.name: each for each in (operator, *operators_around(operator))}
            rows += [row(around, device_ms=ms) for around in distinct.values()]
    if not by_shape:
        known = {event.name for event in trace.operators}
        rows += [
            {"operator": change["operator"], "input_shapes": "", f"self_{change['device']}_bytes": change["bytes"]}
            for change in trace.memory
            if change["operator"] in known
        ]
    keys = ["operator", "input_shapes"]
    counts = dict.fromkeys(("calls", *BYTE_COLUMNS), "int64")
    table = pd.DataFrame(rows, columns=[*keys, "calls", *DEVICE_COLUMNS, *CPU_COLUMNS, *BYTE_COLUMNS]).fillna(0)
    table = table.groupby(keys, sort=False, as_index=False).sum().astype(counts)
    columns = [] if by_shape else ["input_shapes"]
    if not trace.on_gpu:
        columns += [*DEVICE_COLUMNS, "self_gpu_bytes"]
    if by_shape or not trace.memory:
        columns += BYTE_COLUMNS
    return table.drop(columns=list(dict.fromkeys(columns)))


def _shape(event: Event) -> str:
    return str(event.args.get("Input Dims", "not recorded"))


def _most(table: DataFrame, column: str, limit: int) -> DataFrame:
    return table.sort_values(column, ascending=False, kind="stable").head(limit).reset_index(drop=True)


def basic_analysis(source: Source, *, limit: int = 15, show: bool = False) -> Analysis:
    """Return the operators by device time, CPU time and memory, if recorded."""
    table = operator_table(source)
    order = {"by device time": "device_ms", "by CPU time": "cpu_ms"}
    order |= {"by CPU memory": "self_cpu_bytes", "by GPU memory": "self_gpu_bytes"}
    tables = {name: _most(table, column, limit) for name, column in order.items() if column in table}
    return Analysis("Operators", tables).shown(show)


def advanced_analysis(source: Source, *, limit: int = 15, show: bool = False) -> Analysis:
    """Analyse by operator, by operator and input shape (`record_shapes=True`), and in total."""
    trace = as_trace(source)
    by_operator, by_shape = operator_table(trace), operator_table(trace, by_shape=True)
    first, own = ("device_ms", "self_device_ms") if trace.on_gpu else ("cpu_ms", "self_cpu_ms")
    tables = {"by operator": _most(by_operator, first, limit), "by input shape": _most(by_shape, own, limit)}
    return Analysis("Operators and shapes", tables, _totals(trace)).shown(show)


def _totals(trace: Trace) -> dict[str, float]:
    totals: dict[str, float] = {
        "operators called": len(trace.operators),
        "CPU ms": sum(event.self_time for event in trace.operators) / 1e3,
    }
    if trace.on_gpu:
        kernels = [work for work in trace.device_work if work.category == "kernel"]
        totals |= {
            "kernels": len(kernels),
            "kernel ms": sum(work.duration for work in kernels) / 1e3,
            "device ms": sum(work.duration for work in trace.device_work) / 1e3,
        }
    return totals


def memory_analysis(source: Source, *, limit: int = 15, show: bool = False) -> Analysis:
    """Analyse memory by operator and over time. Needs `profile_memory=True`."""
    import pandas as pd

    trace = as_trace(source)
    if not trace.memory:
        raise UserError("no memory was recorded: profile with profile_memory=True")
    table = operator_table(trace)
    columns = [name for name in ("self_gpu_bytes", "self_cpu_bytes") if name in table]
    tables = {
        f"by {column.split('_')[1]} memory": _most(table[["operator", "calls", column]], column, limit)
        for column in columns
    }
    timeline = pd.DataFrame(trace.memory)
    timeline["time_ms"] = timeline["time_us"] / 1e3
    totals = {
        f"highest {device} bytes": float(rows["total_bytes"].max()) for device, rows in timeline.groupby("device")
    }
    tables["over time"] = timeline[["time_ms", "device", "bytes", "total_bytes", "operator"]]
    return Analysis("Memory", tables, totals).shown(show)


def detect_bottlenecks(source: Source, threshold_ms: float = 10.0, *, show: bool = False) -> list[Bottleneck]:
    """Return the operators that take longer than a threshold in all, on GPU or host, slowest first."""
    trace = as_trace(source)
    shapes: dict[str, list[str]] = defaultdict(list)
    for event in trace.operators:
        if "Input Dims" in event.args and _shape(event) not in shapes[event.name]:
            shapes[event.name].append(_shape(event))
    found = []
    for row in operator_table(trace).to_dict("records"):
        name, cpu_ms, device_ms = row["operator"], row["cpu_ms"], row.get("device_ms", 0.0)
        if max(cpu_ms, device_ms) > threshold_ms:
            found.append(Bottleneck(name, cpu_ms, device_ms, int(row["calls"]), shapes[name]))
    found.sort(key=lambda each: (-each.device_ms, -each.cpu_ms))
    if show:
        for place, each in enumerate(found, start=1):
            print(f"{place}. {each.name}: GPU {each.device_ms:.2f} ms, CPU {each.cpu_ms:.2f} ms, {each.count} calls")
    return found


def generate_performance_report(source: Source, name: str = "model", *, limit: int = 20) -> str:
    """Return the analyses above as one text."""
    trace = as_trace(source)
    parts = [f"Performance of {name}", "", str(advanced_analysis(trace, limit=limit))]
    if trace.memory:
        memory = memory_analysis(trace, limit=limit)
        by_operator = {title: table for title, table in memory.tables.items() if title != "over time"}
        parts += ["", str(Analysis(memory.title, by_operator, memory.totals))]
    totals = _totals(trace)
    if totals.get("device ms"):
        parts += ["", f"CPU time is {totals['CPU ms'] / totals['device ms']:.2f} times device time."]
    return "\n".join(parts)
