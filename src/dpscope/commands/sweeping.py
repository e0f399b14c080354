"""Parts that subcommands share: the console, and for those that measure options, planning, progress, the summary.

The console is the terminal at its own width, or plain text of a fixed width into a pipe. A running sweep is shown as a
live bar on a terminal, and elsewhere as one plain line for each row.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from dpscope.commands.options import (
    CommaList,
    F,
    instrument_options,
    step_options,
    sweep_options,
    workload_from,
    workload_options,
)
from dpscope.comparison import Comparison, compare
from dpscope.endings import Ended, ending_of, leave
from dpscope.errors import UserError
from dpscope.packages import MEASURING, require
from dpscope.plain_text import SUMMARY_WIDTH
from dpscope.results.schema import Result
from dpscope.results.store import new_folder
from dpscope.runner.planning import DEFAULT_BATCH_SIZE, DEFAULT_METHODS, Plan, plan_sweep
from dpscope.runner.spec import RunSpec
from dpscope.runner.sweep import Limits, SweepObserver
from dpscope.units import GIB, format_bytes, format_duration, format_ms, format_traffic
from dpscope.vocabulary.instruments import INSTRUMENTS
from dpscope.vocabulary.methods import STANDARD
from dpscope.vocabulary.settings import FLAGS

# For terminals that are not in Unicode: what says the same there.
PLAIN = {"×": "x", "–": "-", "—": "-", "−": "-", "→": "->", "…": "...", "≈": "~", "·": ".", "≥": ">=", "’": "'"}


class PipeConsole(Console):
    """A console that raises `BrokenPipeError` when its reader is gone, so that callers can react."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def make_console() -> Console:
    codecs.register_error("dpscope.plain", _say_plainly)
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        sys.stdout.reconfigure(errors="dpscope.plain")
    # No markup: `[triton]` in a remedy or a module's name is text, not a style.
    console = PipeConsole(markup=False)
    return console if console.is_terminal else PipeConsole(width=SUMMARY_WIDTH, color_system=None, markup=False)


def files_written(files: Sequence[Path]) -> str:
    return "\n".join(["Written:", *(f"  {path}" for path in files)])


def name_files(console: Console, files: Sequence[Path]) -> None:
    """Print every file that was written, and last the one to open."""
    console.print(f"\n{files_written(files)}", highlight=False, soft_wrap=True)
    for page in (path for path in files if path.suffix == ".html"):
        console.print(Text(f"\nOpen: {page}", style="bold"), soft_wrap=True)


def _say_plainly(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(PLAIN.get(character, "?") for character in error.object[error.start : error.end]), error.end


EARLY_ROWS = 4  # after fewer the time left is a rough guess
START_SHARE = 0.5  # of the quickest row's time: imports, the model, the device
METHOD_WORK = {STANDARD: 1.0, "flash": 1.3, "flat": 2.0}  # of a step; other methods as the slowest
SLOWEST_WORK = 2.5


def _work_of(spec: RunSpec) -> float:
    """Return the work of a row's steps in tokens or samples, weighted by method. Its time is proportional to it."""
    samples = spec.batch_size * spec.accumulate * (spec.seq_len or 1) * (spec.warmup + spec.steps)
    return samples * METHOD_WORK.get(spec.method, SLOWEST_WORK)


class SweepProgress(SweepObserver):
    """Progress of a sweep, as a context manager."""

    def __init__(self, console: Console, specs: Sequence[RunSpec]) -> None:
        self._console = console
        self._specs = specs
        self.rows = rows = len(specs)
        self.finished = 0
        self._measured: list[tuple[RunSpec, float]] = []  # rows measured so far, and their seconds
        self._started = 0.0
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._all = self._bar.add_task("sweep", total=rows, note="")
        self._row = self._bar.add_task("", total=None, note="")

    def __enter__(self) -> SweepProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def row_started(self, row: int, spec: RunSpec) -> None:
        self._started = time.monotonic()
        self._bar.reset(self._row, description=escape(f"{spec.label} {spec.instrument}"), total=None, note="starting")

    def row_progress(self, row: int, stage: str, done: int, total: int) -> None:
        self._bar.update(self._row, completed=done, total=total, note=stage)

    def row_finished(self, row: int, result: Result, *, kept: bool) -> None:
        if not kept:
            self._measured.append((self._specs[row], time.monotonic() - self._started))
        self.finished += 1
        left = self._time_left(row)
        self._bar.update(self._all, note=left)
        self._bar.advance(self._all)
        self._console.print(self._line(row, result, kept=kept, left=left), highlight=False, soft_wrap=True)

    def _time_left(self, row: int) -> str:
        """Estimate the time left: for each row a start, and its work at the rate of earlier rows of the instrument."""
        ahead = self._specs[row + 1 :]
        if not (self._measured and ahead):
            return ""
        start = START_SHARE * min(seconds for _, seconds in self._measured)
        seconds = 0.0
        for spec in ahead:
            own = [each for each in self._measured if each[0].instrument == spec.instrument] or self._measured
            rate = sum(took - start for _, took in own) / sum(_work_of(each) for each, _ in own)
            seconds += start + rate * _work_of(spec)
        unknown = {spec.instrument for spec in ahead} - {spec.instrument for spec, _ in self._measured}
        early = unknown or self.finished < EARLY_ROWS
        return f"{'at least' if unknown else 'roughly' if early else 'about'} {format_duration(seconds)} left"

    def _line(self, row: int, result: Result, *, kept: bool, left: str) -> str:
        spec = RunSpec.from_dict(result.spec)
        figures = ", ".join(_figures(result))
        note = " (kept)" if kept else ""
        # A terminal shows it on the bar; who reads a log wants to know it too.
        left = f" ({left})" if left and not self._console.is_terminal else ""
        return f"[{row + 1}/{self.rows}] {spec.label} {spec.instrument}: {figures}{note}{left}"


def _figures(result: Result) -> Iterator[str]:
    """Yield the figures in a row's line: those that its instrument measured."""
    if not result.ok:
        yield f"{result.status}: {result.reason}"
    if result.timing:
        yield f"{format_ms(result.timing['median_ms'])} a step"
    if compilation := result.timing.get("compilation"):
        yield f"compiled in {format_duration(compilation['seconds'])}"
    if result.memory:
        yield f"peak {format_bytes(result.memory['peak_bytes'])}"
    traffic = result.ncu.get("traffic", {})
    if "dram_read_bytes" in traffic and "dram_write_bytes" in traffic:
        read, written = (format_traffic(traffic[f"dram_{way}_bytes"]) for way in ("read", "write"))
        label = "DRAM" if result.ncu["source"] == "measured" else "DRAM (estimate)"
        yield f"{label} {read} read, {written} written a step"
    if "gpu" in result.nsys:
        gpu = result.nsys["gpu"]
        yield f"{format_ms(gpu['busy_ms'])} GPU busy a step, {format_ms(gpu['idle_ms'])} idle"
    if result.trace:
        yield f"{result.trace['steps']} steps traced, {format_bytes(sum(result.trace['files'].values()))}"


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
    if out is None and resume:
        raise UserError("--resume needs --out DIR: the folder of the sweep to finish")
    folder = out or new_folder(command)
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
