"""`dpscope compare`: the main job."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from dpscope.commands.console import make_console
from dpscope.commands.options import (
    CommaList,
    output_folder,
    resolve_device,
    step_options,
    sweep_options,
    workload_from,
    workload_options,
)
from dpscope.commands.progress import SweepProgress
from dpscope.comparison import compare
from dpscope.reports.text import files_written, summary
from dpscope.runner.launcher import Limits
from dpscope.runner.spec import make_sweep
from dpscope.trainers.registry import STANDARD, resolve_method
from dpscope.units import GIB


@click.command(name="compare")
@click.option(
    "--methods",
    type=CommaList(str),
    default="standard,flat,ghost,flash",
    show_default=True,
    help="What to compare; standard is the denominator.",
)
@workload_options
@click.option("--batch-size", type=CommaList(int), default="8", show_default=True, help="Samples in a batch, as 8,16.")
@click.option("--seq-len", type=CommaList(int), help="Sequence lengths, as 256,1024 [default: 256 or the model's].")
@step_options
@sweep_options
def command(
    methods: list[str],
    batch_size: list[int],
    seq_len: list[int] | None,
    device: str,
    out: Path | None,
    resume: bool,
    overwrite: bool,
    timeout: float,
    memory_limit: float | None,
    **options: Any,
) -> None:
    """Compare methods on one model: each at every batch size and sequence length, each in a process of its own.

    \b
    dpscope compare
    dpscope compare --model 1b --dtype bf16 --batch-size 8 --seq-len 1024
    dpscope compare --methods standard,ghost --batch-size 2,4 --seq-len 64,128 --out mine --resume
    """
    workload = workload_from(options)
    names = [resolve_method(name).name for name in methods]
    specs = make_sweep(
        workload,
        methods=sorted(dict.fromkeys(names), key=lambda name: name != STANDARD),
        batch_sizes=batch_size,
        seq_lens=seq_len or [None],
        device=resolve_device(device),
        **options,
    )
    folder = output_folder(out, resume=resume, command="compare")
    limits = Limits(timeout=timeout, memory=None if memory_limit is None else memory_limit * GIB)

    console = make_console()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    try:
        with SweepProgress(console, len(specs)) as progress:
            comparison = compare(
                specs, out=folder, resume=resume, overwrite=overwrite, limits=limits, observer=progress
            )
    except KeyboardInterrupt:
        say(f"Interrupted. Finished rows are in {folder}: go on with the same command and --resume.")
        sys.exit(130)

    console.print()
    console.print(summary(comparison.results, comparison.skipped, width=console.width))
    say(f"\n{files_written(comparison.files)}")
    say(f"\nShow this again: dpscope report {folder}")
    if comparison.ok:
        say("Next: sweep sizes with --batch-size 8,16 --seq-len 256,512; on a GPU try --model 1b --dtype bf16.")
    sys.exit(0 if comparison.ok else 1)
