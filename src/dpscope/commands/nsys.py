"""`dpscope nsys`: a timeline of a few steps with Nsight Systems, and its summary."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Group

from dpscope.commands.console import make_console
from dpscope.commands.sweeping import follow_sweep, plan_from, sweep_arguments
from dpscope.errors import UserError
from dpscope.runner.spec import INSTRUMENTS, RunSpec

OPTIONS = tuple(INSTRUMENTS["nsys"])


@click.command(name="nsys")
@sweep_arguments
@click.option(
    "--captured-steps",
    type=click.IntRange(min=1),
    default=INSTRUMENTS["nsys"]["captured_steps"],
    show_default=True,
    help="Steps on the timeline, after the warm-up (--steps has no part in it).",
)
@click.option("--trace", default=INSTRUMENTS["nsys"]["trace"], show_default=True, help="What nsys records.")
@click.option("--autograd", is_flag=True, help="An NVTX range for every operator: large, and slower on the host.")
@click.option("--cpu-sampling", is_flag=True, help="Sample the host's threads too: needs permission, slows the host.")
@click.option("--gpu-metrics", is_flag=True, help="Utilisation of the GPU's units too: needs permission for counters.")
@click.option("--print-command", is_flag=True, help="Print the commands that would run, and run nothing.")
@click.option("--launch", is_flag=True, help="Print how to record by hand while this workload trains.")
@click.option(
    "--read", type=click.Path(path_type=Path), metavar="FILE", help="Summarise a .sqlite or .nsys-rep that exists."
)
def command(print_command: bool, launch: bool, read: Path | None, **options: Any) -> None:
    """Record a few steps of each method with Nsight Systems and say what the GPU did in each phase.

    \b
    dpscope nsys --model 1b --dtype bf16 --batch-size 8 --seq-len 1024
    dpscope nsys --methods flat --print-command      # what would run
    dpscope nsys --methods flat --launch             # record by hand
    dpscope nsys --read report.sqlite                # a capture that exists, without a GPU

    The profiled process sees only the variables it needs: nsys writes its whole environment into the report.
    """
    if read is not None:
        _show(read)
        return
    asked = {"nsys": {name: options.pop(name) for name in OPTIONS}}
    specs = plan_from(
        options, instruments=("nsys",), instrument_options=asked, for_other_machine=print_command or launch
    ).specs
    if print_command:
        _print_commands(specs, options["out"])
    elif launch:
        _print_recipe(specs)
    else:
        _measure(specs, options)


def _measure(specs: list[RunSpec], options: dict[str, Any]) -> None:
    from dpscope.runner.measurements.nsys import require_nsys

    require_nsys(specs[0])  # before the first row, not in each of them
    comparison = follow_sweep("nsys", specs, **options)
    if comparison.ok:
        print("Next: open the .nsys-rep files with nsys-ui; docs/nsys.md says what to strip before you share one.")
    sys.exit(0 if comparison.ok else 1)


def _print_commands(specs: list[RunSpec], out: Path | None) -> None:
    from dpscope.instruments.nsys.command import needed_variables, profile_command, shown
    from dpscope.runner.measurements.nsys import capture_settings, report_name
    from dpscope.runner.ranged_step import program

    nsys = _nsys_here_or_anywhere()
    for spec in specs:
        report = (out or Path()).resolve() / report_name(spec)
        command_line = profile_command(nsys, program(spec), report, capture_settings(spec))
        print(shown(command_line, needed_variables(os.environ)))


def _print_recipe(specs: list[RunSpec]) -> None:
    from dpscope.instruments.nsys.command import interactive_commands, needed_variables
    from dpscope.runner.measurements.nsys import capture_settings, report_name
    from dpscope.runner.ranged_step import KEEP_GOING, program

    spec = specs[0]
    commands = interactive_commands(
        _nsys_here_or_anywhere(),
        program(spec, KEEP_GOING),
        capture_settings(spec),
        session=report_name(spec).replace("_", "-"),
        environment=needed_variables(os.environ),
    )
    print(RECIPE.format(label=spec.label, launch=commands[0], start=commands[1], stop=commands[2]))


RECIPE = """\
Recording {label} by hand, in two terminals.

1. Start training (it goes on until Ctrl-C):

{launch}

2. In another terminal, once it says that it trains, start recording:

{start}

3. A few seconds later, stop. 2 and 3 can be repeated; training goes on.

{stop}

Mind:
- Keep recordings below a minute: longer ones are too large to open.
- The report goes to the current folder of 2: make that one you can write, with room, and not /tmp.
- %h becomes the host's name: on storage that several machines share, one would else overwrite another's report.
- Where a scheduler ends the other workers once one has finished, this way is the right one: nothing finishes.
- Sampling of the host is off. With --cpu-sampling a kernel setting may stand in the way: `dpscope doctor` says.
- `env -i …` keeps your environment out of the program, and so out of the report; nsys may still write down the
  variables of other processes it finds. Share a stripped export (docs/nsys.md)."""


def _nsys_here_or_anywhere() -> Any:
    """This machine's nsys, or one that knows every option, since the command is for another machine."""
    from dpscope.instruments.nsys.finding import Nsys, find_nsys, look_at

    path = find_nsys()
    if path is not None:
        return look_at(path)
    print("No nsys on this machine: the command is for one that has a recent one on its PATH.", file=sys.stderr)
    return Nsys("nsys", None, frozenset())


def _show(path: Path) -> None:
    from dpscope.instruments.nsys.reading import read_timeline
    from dpscope.instruments.nsys.summary import summarise
    from dpscope.reports.trace.nsys_text import describe_captures

    summary = summarise(read_timeline(_exported(path)))
    make_console().print(Group(*describe_captures([(path.stem, summary)])))


def _exported(path: Path) -> Path:
    """The SQLite export of a report; made beside it if it is not there yet."""
    from dpscope.instruments.nsys.command import needed_variables
    from dpscope.instruments.nsys.failures import NO_NSYS
    from dpscope.instruments.nsys.finding import find_nsys
    from dpscope.instruments.nsys.running import export

    if path.suffix != ".nsys-rep" or not path.is_file():
        return path
    if (database := path.with_suffix(".sqlite")).exists():
        return database
    nsys = find_nsys()
    if nsys is None:
        raise UserError(f"{path} has to be exported first, and {NO_NSYS}")
    made, failure, _ = export(nsys, path, environment=needed_variables(os.environ))
    if made is None:
        raise UserError(str(failure))
    return made
