"""The `dpscope` command: finds and runs the subcommand's file, and reports errors as one sentence."""

from __future__ import annotations

import importlib
import importlib.util
from itertools import pairwise
from typing import Any

import click

from dpscope.endings import ends_in_a_sentence
from dpscope.errors import UserError
from dpscope.vocabulary.instruments import INSTRUMENTS
from dpscope.vocabulary.version import __version__

# Subcommand -> what `dpscope --help` says of it. Each lives in commands/NAME.py (`-` as `_`) as `command`; that of an
# instrument without such a file is made from what is known of the instrument.
COMMANDS = {
    "compare": "Compare methods: time and peak memory of private training next to ordinary training.",
    **{name: INSTRUMENTS[name].summary for name in ("memory", "ncu")},
    "ncu-read": "Show Nsight Compute reports (.ncu-rep) that exist, on any machine.",
    **{name: INSTRUMENTS[name].summary for name in ("trace", "nsys")},
    **{name: each.summary for name, each in INSTRUMENTS.items() if each.summary},
    "plan": "What private training will take on a card: peak, batch, time, privacy, before it is run.",
    "report": "Show results that exist again, without measuring.",
    "check": "Is a method exact? Its clipped gradient against micro-batches of one.",
    "selftest": "One CPU step of every trainer on a small model.",
    "doctor": "What works on this machine, what does not, and how to fix it.",
}


class LazyGroup(click.Group):
    """Group that loads a subcommand's module only when it is needed, so that --help is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = f"dpscope.commands.{cmd_name.replace('-', '_')}"
        if importlib.util.find_spec(module) is None:
            from dpscope.commands.sweeping import instrument_command

            return instrument_command(cmd_name)
        command: click.Command = importlib.import_module(module).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with ends_in_a_sentence():
            return super().make_context(*arguments, **options)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # An empty value is mostly that of a shell variable that was never set.
        for before, argument in pairwise(["", *args[1:]]):
            name, equals, value = argument.partition("=")
            if not argument or (equals and not value and name.startswith("-")):
                what = name or (before if before.startswith("-") else "an argument")
                raise UserError(f"{what} is empty: give it a value, or leave it out")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with ends_in_a_sentence():
            return super().invoke(ctx)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="dpscope")
def main() -> None:
    """See what differentially private training costs, then stop paying it.

    Start with `dpscope doctor`, then `dpscope compare`.
    """
