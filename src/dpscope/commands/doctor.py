"""`dpscope doctor`: what works on this machine, what does not, and how to fix it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
from rich.text import Text

from dpscope.commands.options import json_option, write_json
from dpscope.commands.sweeping import make_console
from dpscope.endings import leave
from dpscope.plain_text import as_json, bare_table
from dpscope.runner.diagnosis import ABSENT, BROKEN, PRESENT, diagnose

COLOURS = {PRESENT: "green", ABSENT: "yellow", BROKEN: "bold red"}


@click.command(name="doctor")
@json_option
def command(json_file: Path | None) -> None:
    """Check Python, torch, CUDA, Opacus, Triton, torch.compile, packages, Nsight and disk; say how to fix them."""
    diagnoses = diagnose()
    blocked = [each.name for each in diagnoses if each.required and each.status != PRESENT]
    if json_file is not None:
        checks = [asdict(each) for each in diagnoses]
        whole = {"document": "dpscope.doctor", "version": 1, "ready": not blocked, "checks": checks}
        write_json(json_file, as_json(whole))
    headings = ("what", "status", "found")
    table = bare_table(*headings, left=headings, wrap=headings)
    for each in diagnoses:
        found = each.found if each.status == PRESENT else f"{each.found}. To fix: {each.remedy}"
        table.add_row(each.name, Text(each.status, style=COLOURS[each.status]), found)
    console = make_console()
    console.print(table)
    if blocked:
        console.print(f"\nNothing can be measured before this is fixed: {', '.join(blocked)}.")
        leave(False)
    console.print("\nReady: try `dpscope compare`.")
