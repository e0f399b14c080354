"""`dpscope ncu`: the bytes that privacy moves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from dpscope.commands.sweeping import follow_sweep, instrument_arguments, plan_instrument
from dpscope.endings import leave
from dpscope.errors import UserError

GUIDE = "ncu-guide.md"  # of docs/, for `--guide`; wheels carry it beside this file
GUIDE_HELP = "Print the guide to reading reports and traffic, and measure nothing."


def guide_text() -> str:
    """Return the guide as Markdown, from the installed package or from the checkout it runs in."""
    here = Path(__file__)
    places = (here.with_name(GUIDE), here.parents[3] / "docs" / GUIDE)
    return next(place for place in places if place.is_file()).read_text(encoding="utf-8")


def _print_guide(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked:
        print(guide_text(), end="")
        context.exit()


@click.command(name="ncu")
@instrument_arguments("ncu")
@click.option("--guide", is_flag=True, is_eager=True, expose_value=False, callback=_print_guide, help=GUIDE_HELP)
@click.option("--print-command", is_flag=True, help="Print the ncu commands and measure nothing.")
def command(print_command: bool, **options: Any) -> None:
    """Count the bytes that one step moves through DRAM and L2: each method at every batch size and sequence length.

    Bytes come from Nsight Compute, time from a run without it. If ncu cannot count (none installed, no permission,
    no GPU) the bytes are estimated from tensor sizes and say so.

    \b
    dpscope ncu --model 1b --dtype bf16 --batch-size 8 --seq-len 1024
    dpscope ncu --methods standard,ghost --per-kernel --top 20
    dpscope ncu --print-command
    """
    pattern = options["kernel"]
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"--kernel {pattern!r} is not a regular expression: {error}") from None
    options["per_kernel"] |= bool(options["kernel"])
    specs = plan_instrument(options, "ncu", for_other_machine=print_command)
    if print_command:
        from dpscope.runner.measurements.ncu import printed_commands

        print("\n".join(line for spec in specs if spec.instrument == "ncu" for line in printed_commands(spec)))
        return
    leave(follow_sweep("ncu", specs, **options).ok)
