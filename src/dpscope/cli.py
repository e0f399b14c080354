"""The `dpscope` command: finds the subcommand's file, runs it, and shows a user's mistake as a sentence."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from dpscope import __version__
from dpscope.errors import UserError

# Subcommand -> what `dpscope --help` says of it. Each lives in commands/NAME.py (`-` as `_`) as `command`.
COMMANDS = {
    "compare": "Compare methods: time and peak memory of private training next to ordinary training.",
    "memory": "Where every byte of the peak goes: memory by component, by module, over time.",
    "ncu": "Nsight Compute: the bytes that a step moves through DRAM and L2, by method.",
    "ncu-read": "Show Nsight Compute reports (.ncu-rep) that exist, on any machine.",
    "trace": "Where a step's time goes: torch.profiler traces, phases, kernels, and what a method adds to standard.",
    "nsys": "Timelines of a few steps with Nsight Systems: GPU time by phase, kernels, copies, idle gaps.",
    "report": "Show results that exist again, without measuring.",
    "check": "Is a method exact? Its clipped gradient against micro-batches of one.",
    "selftest": "One CPU step of every trainer on a small model.",
    "doctor": "What works on this machine, what does not, and how to mend it.",
}


class LazyGroup(click.Group):
    """Loads a subcommand's module only when it is asked for, so that --help is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"dpscope.commands.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            print(f"Error: {error}", file=sys.stderr)
            sys.exit(2)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="dpscope")
def main() -> None:
    """See what differentially private training costs, then stop paying it.

    Start with `dpscope doctor`, then `dpscope compare`.
    """
