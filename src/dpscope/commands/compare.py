"""`dpscope compare`: the main job."""

from __future__ import annotations

import sys
from typing import Any

import click

from dpscope.commands.options import CommaList
from dpscope.commands.sweeping import follow_sweep, specs_from, sweep_arguments
from dpscope.comparison import INSTRUMENTS


@click.command(name="compare")
@sweep_arguments
@click.option(
    "--instruments",
    type=CommaList(str),
    default=",".join(INSTRUMENTS),
    show_default=True,
    help="How to look, each in a process of its own: time alone is twice as quick.",
)
def command(instruments: list[str], **options: Any) -> None:
    """Compare methods on one model: each at every batch size and sequence length, each in a process of its own.

    \b
    dpscope compare
    dpscope compare --model 1b --dtype bf16 --batch-size 8 --seq-len 1024
    dpscope compare --methods standard,ghost --batch-size 2,4 --seq-len 64,128 --out mine --resume
    """
    specs = specs_from(options, instruments=instruments)
    comparison = follow_sweep("compare", specs, **options)
    if comparison.ok:
        print("Next: sweep sizes with --batch-size 8,16 --seq-len 256,512; on a GPU try --model 1b --dtype bf16.")
    sys.exit(0 if comparison.ok else 1)
