"""A TensorBoard log of rows that were traced: scalars, tables as text, figures as images, and the traces themselves.

TensorBoard's own profiler tab is no longer maintained, so everything a person needs is in its standard tabs, which
work offline; the traces lie where that tab would look for them (`*.pt.trace.json.gz`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dpscope.errors import UserError
from dpscope.packages import install_command
from dpscope.reports.tables import Row
from dpscope.reports.trace.data import Difference, differences, trace_of, traced
from dpscope.reports.trace.figures import DRAWINGS
from dpscope.units import mib

COMPARED = "comparison"


def write_log(rows: Sequence[Row], folder: Path, logdir: Path) -> Path:
    """Write a log of the rows measured into `folder`; the log's folder below `logdir`."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(f"tensorboard is not installed: {install_command('tensorboard')}") from None
    log = logdir / folder.name
    groups = traced(rows)
    if not groups:
        raise UserError("no row was traced")
    shutil.rmtree(log, ignore_errors=True)  # a log of the same name is of results that were replaced
    for group in groups:
        size = _size(group[0])
        for row in group:
            place = log / size / row.method
            with SummaryWriter(str(place)) as writer:
                _write_scalars(writer, row)
                for tag, text in _tables(row):
                    writer.add_text(tag, text)
            _copy_traces(row, folder, place)
        with SummaryWriter(str(log / size / COMPARED)) as writer:
            for found in differences(group):
                writer.add_text(f"difference/{found.method}", difference_markdown(found))
            for name, (_, draw) in DRAWINGS.items():
                if (figure := draw(group)) is not None:
                    writer.add_image(name, _pixels(figure), dataformats="HWC")
    return log


def _size(row: Row) -> str:
    spec = row.first.spec
    length = f"_seq{spec['seq_len']}" if spec["seq_len"] else ""
    return f"{spec['workload']['name']}_bs{spec['batch_size']}{length}_{spec['dtype']}"


def _write_scalars(writer: Any, row: Row) -> None:
    trace = trace_of(row)
    for number, value in enumerate(row.timing.get("step_ms", [])):
        writer.add_scalar("step_ms/unprofiled", value, number)
    for number, value in enumerate(trace["each_step_ms"]):
        writer.add_scalar("step_ms/traced", value, number)
    for part in trace["phases"]:
        writer.add_scalar(f"phase_host_ms/{part['phase']}", part["cpu_ms"])
        if "gpu" in trace:
            writer.add_scalar(f"phase_gpu_ms/{part['phase']}", part["gpu_ms"])
    for name, value in trace.get("gpu", {}).items():
        writer.add_scalar(f"gpu/{name}", value)
    if row.peak_bytes is not None:
        writer.add_scalar("memory/peak_mib", mib(row.peak_bytes))
    for device, points in trace.get("memory", {}).get("over_time", {}).items():
        for time_ms, allocated in points:  # TensorBoard's steps are whole numbers: microseconds
            writer.add_scalar(f"memory/{device}_mib_over_time_us", mib(allocated), round(time_ms * 1000))


def _tables(row: Row) -> Iterator[tuple[str, str]]:
    """Every table of the trace as Markdown, the longest columns cut to what a page can hold."""
    trace = trace_of(row)
    for name in (
        "phases",
        "operators",
        "kernels",
        "families",
        "named",
        "synchronisations",
        "copies",
        "casts",
        "modules",
    ):
        if found := trace.get(name):
            yield f"trace/{name}", markdown(found[:40])
    if memory := trace.get("memory"):
        yield "trace/memory", markdown(memory["operators"][:40])


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    headings = list(rows[0])
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    lines += ["| " + " | ".join(_cell(row.get(name, "")) for name in headings) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{name} {_cell(part)}" for name, part in value.items())
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value).replace("|", "\\|")


def difference_markdown(found: Difference) -> str:
    rows = [
        {
            "operator": c.operator,
            "phase": c.phase,
            "": c.kind,
            "standard ms": c.before_ms,
            f"{found.method} ms": c.after_ms,
            "difference ms": c.ms,
        }
        for c in found.changes[:40]
    ]
    rest = sum(change.ms for change in found.changes[40:])
    last = [{"operator": f"{len(found.changes) - 40} others", "difference ms": rest}] if len(found.changes) > 40 else []
    return markdown([*rows, *last, {"operator": "**the whole step**", "difference ms": found.total_ms}])


def _copy_traces(row: Row, folder: Path, place: Path) -> None:
    for number, name in enumerate(row.measured["trace"].files.values()):
        source = folder / name
        if source.is_file():
            shutil.copyfile(source, place / f"{row.method}.{number}.pt.trace.json.gz")


def _pixels(figure: Any) -> Any:
    import numpy as np

    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[:, :, :3]
