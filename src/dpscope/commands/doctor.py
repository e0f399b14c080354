"""`dpscope doctor`: what works on this machine, what does not, and how to mend it."""

from __future__ import annotations

import click
from rich.text import Text

from dpscope.commands.console import make_console
from dpscope.endings import leave
from dpscope.plain_text import bare_table
from dpscope.runner.diagnosis import ABSENT, BROKEN, PRESENT, diagnose

COLOURS = {PRESENT: "green", ABSENT: "yellow", BROKEN: "bold red"}


@click.command(name="doctor")
def command() -> None:
    """Check Python, torch, CUDA, Opacus, Triton, torch.compile, packages, Nsight and disk; say how to mend them."""
    diagnoses = diagnose()
    headings = ("what", "status", "found")
    table = bare_table(*headings, left=headings, wrap=headings)
    for each in diagnoses:
        found = each.found if each.status == PRESENT else f"{each.found}. To mend: {each.remedy}"
        table.add_row(each.name, Text(each.status, style=COLOURS[each.status]), found)
    console = make_console()
    console.print(table)
    if blocked := [each.name for each in diagnoses if each.required and each.status != PRESENT]:
        console.print(f"\nNothing can be measured before this is mended: {', '.join(blocked)}.")
        leave(False)
    console.print("\nReady: try `dpscope compare`.")
