"""`dpscope compare`: the main job."""

from __future__ import annotations

import sys
from typing import Any

import click

from dpscope.commands.options import CommaList, resolve_device
from dpscope.commands.sweeping import follow_sweep, specs_from, sweep_arguments
from dpscope.comparison import INSTRUMENTS
from dpscope.errors import UserError
from dpscope.packages import MEASURING, require
from dpscope.runner.instruments import ALL, choose_instruments
from dpscope.runner.spec import INSTRUMENTS as KNOWN
from dpscope.runner.spec import RunSpec


@click.command(name="compare")
@sweep_arguments
@click.option(
    "--instruments",
    type=CommaList(str),
    help=f"How to look, each in a process of its own: {', '.join(KNOWN)}, or all "
    f"[default: {','.join(INSTRUMENTS)}; time alone is twice as quick].",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Every instrument that can work on this machine, for the whole page: the same as --instruments all.",
)
def command(instruments: list[str] | None, everything: bool, **options: Any) -> None:
    """Compare methods on one model: each at every batch size and sequence length, each in a process of its own.

    \b
    dpscope compare
    dpscope compare --model 1b --dtype bf16 --batch-size 8 --seq-len 1024
    dpscope compare --all --model 1b --dtype bf16 --out page --resume
    dpscope compare --methods standard,ghost --batch-size 2,4 --seq-len 64,128 --out mine --resume
    """
    if everything and instruments is not None:
        raise UserError("--all is every instrument: leave out --instruments, or --all")
    require(*MEASURING)
    asked = [ALL] if everything else instruments or list(INSTRUMENTS)
    choice = choose_instruments(asked, resolve_device(options["device"]) if ALL in asked else "cpu")
    specs = specs_from(options, instruments=choice.instruments)
    if ALL in asked:
        print(f"{len(specs)} rows, each in a process of its own: {', '.join(choice.instruments)}.")
        print("".join(f"  {remark}\n" for remark in choice.remarks), end="", flush=True)
    comparison = follow_sweep("compare", specs, **options)
    if comparison.ok:
        print(f"Next: {_next_steps(specs[0], whole=ALL in asked)}.")
    sys.exit(0 if comparison.ok else 1)


def _next_steps(spec: RunSpec, *, whole: bool) -> str:
    """What has not been tried yet, of options that this workload takes."""
    sizes = f"--batch-size {spec.batch_size},{2 * spec.batch_size}"
    if spec.seq_len is not None and spec.seq_len > 1:
        sizes += f" --seq-len {spec.seq_len // 2},{spec.seq_len}"
    page = [] if whole else ["the whole page with --all"]
    return "; ".join([*page, f"more sizes with {sizes}", "your own model with --workload (docs/workloads.md)"])
