"""`dpscope trace`: why a method is slow; and the TensorBoard log of traced rows, in its standard tabs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import click

from dpscope.commands.sweeping import follow_sweep, instrument_arguments, plan_instrument
from dpscope.endings import leave
from dpscope.errors import UserError
from dpscope.packages import install_command
from dpscope.reports.tables import Row
from dpscope.reports.trace.data import StepDifference, TracedStep, differences, traced
from dpscope.reports.trace.figures import DRAWINGS
from dpscope.results.payloads.trace import TracePayload
from dpscope.units import mib


@click.command(name="trace")
@instrument_arguments("trace")
@click.option(
    "--logdir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder of the TensorBoard log.",
)
@click.option("--no-log", is_flag=True, help="Write no TensorBoard log.")
def command(*, logdir: Path, no_log: bool, **options: Any) -> None:
    """Record steps of each method with torch.profiler and show where their time goes.

    Each method is timed without the profiler too, in a process of its own: a traced step is slower than a real one.

    \b
    dpscope trace
    dpscope trace --methods standard,flat,ghost --model 1b --dtype bf16 --batch-size 8 --seq-len 1024
    dpscope trace --methods standard,flat --stacks --modules --shapes
    """
    specs = plan_instrument(options, "trace")
    if logdir.exists() and not logdir.is_dir():
        raise UserError(f"{logdir} is a file, not a folder: choose another --logdir")
    comparison = follow_sweep("trace", specs, **options)
    print("\nOpen a trace.json.gz at https://ui.perfetto.dev (it stays in your browser) or chrome://tracing.")
    if not no_log:
        try:
            log = write_log(comparison.rows, comparison.folder, logdir)
            print(f"TensorBoard log: {log}. Look at it with: tensorboard --logdir {logdir}")
        except UserError as error:
            print(f"No TensorBoard log: {error}")
    leave(comparison.ok)


COMPARISON_RUN, CHANGE = "comparison", "difference ms"
TABLE_LINES = 40  # of a table
TRACE_TABLES = ("phases", "operators", "kernels", "families", "named", "synchronisations", "copies", "casts", "modules")


def write_log(rows: Sequence[Row], folder: Path, logdir: Path) -> Path:
    """Write a log of the rows measured in `folder`, and return the log's folder below `logdir`."""
    try:
        import numpy as np
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(f"tensorboard is not installed: {install_command('tensorboard')}") from None
    log = logdir / folder.name
    groups = traced(rows)
    if not groups:
        raise UserError("no row was traced")
    shutil.rmtree(log, ignore_errors=True)  # a log of the same name is of results that were replaced
    for steps in groups:
        row = steps[0].row
        length = f"_seq{row.spec['seq_len']}" if row.spec["seq_len"] else ""
        place = log / f"{row.field('model')}_bs{row.spec['batch_size']}{length}_{row.spec['dtype']}"
        for step in steps:
            with SummaryWriter(str(place / step.method)) as writer:
                _write_scalars(writer, step)
                for tag, text in _tables(step.trace).items():
                    writer.add_text(tag, text)
            for number, file in enumerate(step.row.measured["trace"].files.values()):
                if (folder / file).is_file():
                    shutil.copyfile(folder / file, place / step.method / f"{step.method}.{number}.pt.trace.json.gz")
        with SummaryWriter(str(place / COMPARISON_RUN)) as writer:
            for found in differences(steps):
                writer.add_text(f"difference/{found.method}", difference_markdown(found))
            for name, (_, draw) in DRAWINGS.items():
                if (figure := draw([step.row for step in steps])) is not None:
                    figure.canvas.draw()
                    pixels = np.asarray(cast(Any, figure.canvas).buffer_rgba())[:, :, :3]
                    writer.add_image(name, pixels, dataformats="HWC")
    return log


def _write_scalars(writer: Any, step: TracedStep) -> None:
    trace = step.trace
    for number, value in enumerate(step.row.timing.get("step_ms", [])):
        writer.add_scalar("step_ms/unprofiled", value, number)
    for number, value in enumerate(trace["each_step_ms"]):
        writer.add_scalar("step_ms/traced", value, number)
    for part in trace["phases"]:
        writer.add_scalar(f"phase_host_ms/{part['phase']}", part["cpu_ms"])
        if step.gpu:
            writer.add_scalar(f"phase_gpu_ms/{part['phase']}", part["gpu_ms"])
    for name, figure in (step.gpu or {}).items():
        writer.add_scalar(f"gpu/{name}", figure)
    if step.row.peak_bytes is not None:
        writer.add_scalar("memory/peak_mib", mib(step.row.peak_bytes))
    for device, points in trace["memory"]["over_time"].items() if "memory" in trace else ():
        for time_ms, allocated in points:  # TensorBoard's steps are whole numbers: microseconds
            writer.add_scalar(f"memory/{device}_mib_over_time_us", mib(allocated), round(time_ms * 1000))


def _tables(trace: TracePayload) -> dict[str, str]:
    """Return every table of the trace as Markdown, cut to what a page can hold."""
    parts: dict[str, Any] = {**trace}
    tables = {name: parts.get(name) for name in TRACE_TABLES} | {"memory": parts.get("memory", {}).get("operators")}
    return {f"trace/{name}": markdown(found[:TABLE_LINES]) for name, found in tables.items() if found}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    headings = list(rows[0])
    cells = [headings, ["---"] * len(headings), *([_cell(row.get(name, "")) for name in headings] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{name} {_cell(part)}" for name, part in value.items())
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value).replace("|", "\\|")


def difference_markdown(found: StepDifference) -> str:
    standard, own = "standard ms", f"{found.method} ms"
    rows: list[dict[str, Any]] = [
        {"operator": c.operator, "phase": c.phase, "": c.kind, standard: c.before_ms, own: c.after_ms, CHANGE: c.ms}
        for c in found.changes[:TABLE_LINES]
    ]
    if rest := found.changes[TABLE_LINES:]:
        rows.append({"operator": f"{len(rest)} others", CHANGE: sum(change.ms for change in rest)})
    return markdown([*rows, {"operator": "**the whole step**", CHANGE: found.total_ms}])
