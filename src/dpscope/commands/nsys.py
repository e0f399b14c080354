"""`dpscope nsys`: a timeline of a few steps with Nsight Systems, and its summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Group

from dpscope.commands.sweeping import follow_sweep, instrument_arguments, make_console, plan_instrument
from dpscope.endings import leave


@click.command(name="nsys")
@instrument_arguments("nsys")
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
        from dpscope.reports.trace.text import Capture, describe_captures
        from dpscope.runner.measurements.nsys import read_nsys_capture

        make_console().print(Group(*describe_captures([Capture(read.stem, read_nsys_capture(read))])))
        return
    specs = plan_instrument(options, "nsys", for_other_machine=print_command or launch)
    if print_command:
        from dpscope.runner.measurements.nsys import find_or_assume_nsys, printed_command

        nsys = find_or_assume_nsys()
        for spec in specs:
            print(printed_command(spec, nsys, (options["out"] or Path()).resolve()))
    elif launch:
        from dpscope.runner.measurements.nsys import find_or_assume_nsys, recording_commands

        training, start, stop = recording_commands(specs[0], find_or_assume_nsys())
        print(RECIPE.format(label=specs[0].label, launch=training, start=start, stop=stop))
    else:
        from dpscope.runner.measurements.nsys import require_nsys

        require_nsys(specs[0])  # before the first row, not in each of them
        comparison = follow_sweep("nsys", specs, **options)
        if comparison.ok:
            print("Next: open the .nsys-rep files with nsys-ui; docs/nsys.md says what to strip before you share one.")
        leave(comparison.ok)


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
