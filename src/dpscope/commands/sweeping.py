"""Parts that measuring subcommands share: options, planning, progress, the summary at the end."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from dpscope.commands.console import SweepProgress, make_console, name_files
from dpscope.commands.options import (
    CommaList,
    F,
    instrument_options,
    output_folder,
    step_options,
    sweep_options,
    workload_from,
    workload_options,
)
from dpscope.comparison import Comparison, compare
from dpscope.endings import Ended, ending_of, leave
from dpscope.packages import MEASURING, require
from dpscope.runner.launcher import Limits
from dpscope.runner.planning import DEFAULT_BATCH_SIZE, DEFAULT_METHODS, Plan, plan_sweep
from dpscope.runner.spec import RunSpec
from dpscope.units import GIB
from dpscope.vocabulary.instruments import INSTRUMENTS
from dpscope.vocabulary.settings import FLAGS


def sweep_arguments(function: F) -> F:
    """Add the options of `plan_from` and `follow_sweep`: rows, steps, and how the sweep runs."""
    methods = click.option(
        "--methods",
        type=CommaList(str),
        default=",".join(DEFAULT_METHODS),
        show_default=True,
        help="What to compare; standard is the denominator.",
    )
    batch_size = click.option(
        "--batch-size",
        type=CommaList(int),
        default=str(DEFAULT_BATCH_SIZE),
        show_default=True,
        help="Samples in a batch, as 8,16.",
    )
    seq_len = click.option(
        "--seq-len", type=CommaList(int), help="Sequence lengths, as 256,1024 [default: 256 or the model's]."
    )
    for decorate in (sweep_options, step_options, seq_len, batch_size, workload_options, methods):
        function = decorate(function)
    return function


def instrument_arguments(instrument: str) -> Callable[[F], F]:
    """Return the same options for an instrument's subcommand, followed by the instrument's own."""
    return lambda function: sweep_arguments(instrument_options(instrument)(function))


def plan_from(
    options: dict[str, Any], instruments: Sequence[str] | None = None, *, for_other_machine: bool = False
) -> Plan:
    """Take the settings of a sweep's rows, with options of the instruments, out of a command's keyword arguments.

    `for_other_machine`: plan for a machine with a GPU, whether or not this one has a GPU.
    """
    if not for_other_machine:
        require(*MEASURING)  # all that is missing, at once
    known = {name: INSTRUMENTS[name].options for name in instruments or () if name in INSTRUMENTS}
    return plan_sweep(
        workload_from(options),
        instruments=instruments,
        options={name: {key: options.pop(key) for key in own if key in options} for name, own in known.items()},
        for_other_machine=for_other_machine,
        **{name: options.pop(name) for name in ("methods", "batch_size", "seq_len", *FLAGS)},
    )


def plan_instrument(options: dict[str, Any], instrument: str, *, for_other_machine: bool = False) -> list[RunSpec]:
    """Return the rows of an instrument's subcommand."""
    beside = ["time"] if INSTRUMENTS[instrument].with_time else []
    return plan_from(options, [*beside, instrument], for_other_machine=for_other_machine).specs


def instrument_command(instrument: str) -> click.Command:
    """Return the subcommand of an instrument that needs only its own options."""

    @click.command(name=instrument, help=INSTRUMENTS[instrument].summary)
    @instrument_arguments(instrument)
    def command(**options: Any) -> None:
        leave(follow_sweep(instrument, plan_instrument(options, instrument), **options).ok)

    return command


def follow_sweep(
    command: str,
    specs: list[RunSpec],
    *,
    out: Path | None,
    resume: bool,
    overwrite: bool,
    timeout: float,
    memory_limit: float | None,
) -> Comparison:
    """Measure with live progress, then print the summary and name every file."""
    folder = output_folder(out, resume=resume, command=command)
    limits = Limits(timeout=timeout, memory=None if memory_limit is None else memory_limit * GIB)
    console = make_console()
    _say_what_will_not_fit(specs)
    progress = SweepProgress(console, specs)
    with _finished_rows_are_named(progress, folder, overwrite=overwrite):
        with progress:
            comparison = compare(
                specs, out=folder, resume=resume, overwrite=overwrite, limits=limits, observer=progress
            )
        console.print()
        console.print(comparison.summary(console.width))
        name_files(console, comparison.files)
        again = f"Show this again: dpscope report {_argument(folder)}"
        console.print(again, markup=False, highlight=False, soft_wrap=True)
    return comparison


def _say_what_will_not_fit(specs: Sequence[RunSpec]) -> None:
    """Name rows that are predicted to run out of the GPU's memory. They are tried all the same."""
    if not any(spec.device == "cuda" for spec in specs):
        return
    import torch

    from dpscope.forecast.fitting import rows_that_will_not_fit

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        line = rows_that_will_not_fit(specs, properties.total_memory, (properties.major, properties.minor))
        if line:
            click.echo(line)


def _argument(path: Path) -> str:
    """Quote a path for a shell so that no command mistakes it for an option."""
    return shlex.quote(f"./{path}" if str(path).startswith("-") else str(path))


@contextmanager
def _finished_rows_are_named(progress: SweepProgress, folder: Path, *, overwrite: bool) -> Iterator[None]:
    """Print where the finished rows are, and how to go on, if the sweep ends early."""
    try:
        yield
    except BaseException as error:
        ending = ending_of(error)
        if ending is None or not progress.finished:
            raise
        where = _argument(folder)
        resume = "--resume instead of --overwrite" if overwrite else "--resume"
        go_on = f"go on with the same command, --out {where} and {resume}"
        if progress.finished == progress.rows:  # only the reports are not written
            go_on = f"dpscope report {where} shows them, and --out ELSEWHERE writes its files to another folder"
        rows = f"{progress.finished} of {progress.rows} rows are finished and in {where}"
        raise Ended(f"{ending.sentence}\n{rows}: {go_on}.".lstrip(), ending.code) from None
