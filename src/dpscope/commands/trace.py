"""`dpscope trace`: why a method is slow."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from dpscope.commands.sweeping import follow_sweep, plan_from, sweep_arguments
from dpscope.comparison import Comparison
from dpscope.errors import UserError
from dpscope.reports.trace.tensorboard import write_log

# Option -> what it records beside names and times.
DETAILS = {
    "shapes": "Record the shapes and number formats of operators' inputs.",
    "memory": "Record allocations and frees, by operator.",
    "stacks": "Record Python stacks: waits are shown with file and line.",
    "modules": "A range around every module: the most expensive ones are named.",
    "flops": "Count the floating-point operations of matrix products and convolutions.",
}
SCHEDULES = ("short", "early_training", "steady_state", "periodic")


def _details(function: Any) -> Any:
    for name, text in reversed(DETAILS.items()):
        function = click.option(f"--{name}", is_flag=True, help=text)(function)
    return function


@click.command(name="trace")
@sweep_arguments
@click.option(
    "--schedule",
    type=click.Choice(SCHEDULES),
    default="short",
    show_default=True,
    help="Which steps are recorded: two after the warm-up, the first, later ones, or some again and again.",
)
@click.option("--trace-steps", type=click.IntRange(1), help="Steps to record in a row [default: the schedule's].")
@_details
@click.option(
    "--logdir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder of the TensorBoard log.",
)
@click.option("--no-log", is_flag=True, help="Write no TensorBoard log.")
def command(*, schedule: str, trace_steps: int | None, logdir: Path, no_log: bool, **options: Any) -> None:
    """Record steps of each method with torch.profiler and show where their time goes.

    Each method is timed without the profiler too, in a process of its own: a traced step is slower than a real one.

    \b
    dpscope trace
    dpscope trace --methods standard,flat,ghost --model 1b --dtype bf16 --batch-size 8 --seq-len 1024
    dpscope trace --methods standard,flat --stacks --modules --shapes
    """
    asked = {name: options.pop(name) for name in DETAILS} | {"schedule": schedule, "trace_steps": trace_steps}
    specs = plan_from(options, instruments=("time", "trace"), instrument_options={"trace": asked}).specs
    if logdir.exists() and not logdir.is_dir():
        raise UserError(f"{logdir} is a file, not a folder: choose another --logdir")
    comparison = follow_sweep("trace", specs, **options)
    print("\nOpen a trace.json.gz at https://ui.perfetto.dev (it stays in your browser) or chrome://tracing.")
    if not no_log:
        print(_log(comparison, logdir))
    sys.exit(0 if comparison.ok else 1)


def _log(comparison: Comparison, logdir: Path) -> str:
    try:
        folder = write_log(comparison.rows, comparison.folder, logdir)
    except UserError as error:
        return f"No TensorBoard log: {error}"
    return f"TensorBoard log: {folder}. Look at it with: tensorboard --logdir {logdir}"
