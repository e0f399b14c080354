"""`dpscope ncu`: the bytes that privacy moves."""

from __future__ import annotations

import re
import sys
from typing import Any

import click

from dpscope.commands.options import ABOVE_ZERO
from dpscope.commands.sweeping import follow_sweep, plan_from, sweep_arguments
from dpscope.errors import UserError
from dpscope.reports.guide import guide_text
from dpscope.runner.spec import INSTRUMENTS

DEFAULTS = INSTRUMENTS["ncu"]
GUIDE_HELP = "Print the guide to reading reports and traffic, and measure nothing."


def _print_guide(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked:
        print(guide_text(), end="")
        context.exit()


@click.command(name="ncu")
@sweep_arguments
@click.option("--per-kernel", is_flag=True, help="Also kernel by kernel: which of them move the bytes, by phase.")
@click.option("--kernel", metavar="REGEX", default="", help="Per kernel, and only those whose name matches.")
@click.option(
    "--top", type=click.IntRange(min=1), default=DEFAULTS["top"], show_default=True, help="Kernels shown one by one."
)
@click.option(
    "--budget", type=ABOVE_ZERO, default=DEFAULTS["budget"], show_default=True, help="Seconds for kernels one by one."
)
@click.option("--metrics", default="", help="More metrics to collect, as ncu or nvprof names them: a,b.")
@click.option("--require-measured", is_flag=True, help="A row that ncu cannot count is not ok; no estimate instead.")
@click.option("--guide", is_flag=True, is_eager=True, expose_value=False, callback=_print_guide, help=GUIDE_HELP)
@click.option("--print-command", is_flag=True, help="Print the ncu commands and measure nothing.")
def command(print_command: bool, **options: Any) -> None:
    """Count the bytes that one step moves through DRAM and L2: each method at every batch size and sequence length.

    Bytes come from Nsight Compute, time from a run without it. Where ncu cannot count (none installed, no permission,
    no GPU) the bytes are estimated from tensor sizes and say so.

    \b
    dpscope ncu --model 1b --dtype bf16 --batch-size 8 --seq-len 1024
    dpscope ncu --methods standard,ghost --per-kernel --top 20
    dpscope ncu --print-command
    """
    _require_regex(options["kernel"])
    asked = {name: options.pop(name) for name in DEFAULTS if name in options}
    asked["per_kernel"] |= bool(asked["kernel"])
    specs = plan_from(
        options, instruments=("time", "ncu"), instrument_options={"ncu": asked}, for_other_machine=print_command
    ).specs
    if print_command:
        from dpscope.runner.measurements.ncu import printed_commands

        print("\n".join(line for spec in specs if spec.instrument == "ncu" for line in printed_commands(spec)))
        return
    comparison = follow_sweep("ncu", specs, **options)
    sys.exit(0 if comparison.ok else 1)


def _require_regex(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"--kernel {pattern!r} is not a regular expression: {error}") from None
