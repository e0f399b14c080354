"""`dpscope compare`: the main job."""

from __future__ import annotations

import sys
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
from dpscope.reports.text import files_written, render_plain, summary
from dpscope.results.store import ResultStore, write_atomically
from dpscope.runner.launcher import Limits
from dpscope.runner.preflight import require_measurable
from dpscope.runner.spec import make_sweep
from dpscope.runner.sweep import open_store, run_sweep
from dpscope.trainers.registry import STANDARD, resolve_method
from dpscope.units import GIB


@click.command(name="compare")
@click.option(
    "--methods",
    type=CommaList(str),
    default="standard,flat,ghost",
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
    require_measurable(specs)
    store = ResultStore(output_folder(out, resume=resume, command="compare"))
    open_store(store, resume=resume, overwrite=overwrite)
    limits = Limits(timeout=timeout, memory=None if memory_limit is None else int(memory_limit * GIB))

    console = make_console()
    try:
        with SweepProgress(console, len(specs)) as progress:
            results = run_sweep(specs, store, resume=resume, limits=limits, observer=progress)
    except KeyboardInterrupt:
        console.print(f"Interrupted. Finished rows are in {store.results}; go on with the same command and --resume.")
        sys.exit(130)

    story = summary(results)
    write_atomically(store.summary, render_plain(story))
    console.print()
    console.print(story)
    paths = [store.summary, *(store.path_of(spec.file_name) for spec in specs)]
    console.print(f"\n{files_written(paths)}", highlight=False, soft_wrap=True)
    console.print(f"\nShow this again: dpscope report {store.folder}", highlight=False, soft_wrap=True)
    sys.exit(0 if all(result.ok for result in results) else 1)
