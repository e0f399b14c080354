"""`dpscope trace`: why a method is slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dpscope.commands.sweeping import follow_sweep, instrument_arguments, plan_instrument
from dpscope.commands.tensorboard import write_log
from dpscope.comparison import Comparison
from dpscope.endings import leave
from dpscope.errors import UserError


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
        print(_log(comparison, logdir))
    leave(comparison.ok)


def _log(comparison: Comparison, logdir: Path) -> str:
    try:
        folder = write_log(comparison.rows, comparison.folder, logdir)
    except UserError as error:
        return f"No TensorBoard log: {error}"
    return f"TensorBoard log: {folder}. Look at it with: tensorboard --logdir {logdir}"
