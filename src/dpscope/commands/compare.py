"""`dpscope compare`: time and memory of every method at every size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dpscope.commands.options import CommaList, json_option, write_json
from dpscope.commands.sweeping import follow_sweep, plan_from, sweep_arguments
from dpscope.endings import leave
from dpscope.errors import UserError
from dpscope.plain_text import as_json
from dpscope.reports.findings import Condition
from dpscope.runner.measure import ALL
from dpscope.runner.planning import COMPARE_INSTRUMENTS
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.instruments import INSTRUMENTS


@click.command(name="compare")
@sweep_arguments
@click.option(
    "--instruments",
    type=CommaList(str),
    help=f"How to look, each in a process of its own: {', '.join(INSTRUMENTS)}, or all "
    f"[default: {','.join(COMPARE_INSTRUMENTS)}; time alone is twice as quick].",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Every instrument that can work on this machine, for the whole page: the same as --instruments all.",
)
@click.option(
    "--fail-if",
    "fail_if",
    multiple=True,
    metavar="CONDITION",
    help="Exit with 1 where it holds, as 'flash.time > 1.2'; time and memory are ratios to standard, ms and gib not.",
)
@json_option
def command(
    instruments: list[str] | None, everything: bool, fail_if: tuple[str, ...], json_file: Path | None, **options: Any
) -> None:
    """Compare methods on one model: each at every batch size and sequence length, each in a process of its own.

    \b
    dpscope compare
    dpscope compare --model 1b --dtype bf16 --batch-size 8 --seq-len 1024
    dpscope compare --all --model 1b --dtype bf16 --out page --resume
    dpscope compare --methods standard,ghost --batch-size 2,4 --seq-len 64,128 --out mine --resume
    """
    if everything and instruments is not None:
        raise UserError("--all is every instrument: leave out --instruments, or --all")
    conditions = [Condition.parse(text) for text in fail_if]
    plan = plan_from(options, [ALL] if everything else instruments)
    whole = everything or ALL in (instruments or ())
    if whole or plan.remarks:
        print(f"{len(plan.specs)} rows, each in a process of its own: {', '.join(plan.instruments)}.")
        print("".join(f"  {remark}\n" for remark in plan.remarks), end="", flush=True)
    comparison = follow_sweep("compare", plan.specs, **options)
    if json_file is not None:
        write_json(json_file, as_json(comparison.to_dict()))
        print(f"Written: {json_file}")
    failed = [sentence for condition in conditions if (sentence := condition.judge(comparison.rows))]
    print("".join(f"Failed: {sentence}.\n" for sentence in failed), end="")
    if comparison.ok and not failed:
        print(f"Next: {_next_steps(plan.specs[0], whole=whole)}.")
    leave(comparison.ok and not failed)


def _next_steps(spec: RunSpec, *, whole: bool) -> str:
    """Return options to try next: those not used yet that this workload takes."""
    sizes = f"--batch-size {spec.batch_size},{2 * spec.batch_size}"
    if spec.seq_len is not None and spec.seq_len > 1:
        sizes += f" --seq-len {spec.seq_len // 2},{spec.seq_len}"
    page = [] if whole else ["the whole page with --all"]
    return "; ".join([*page, f"more sizes with {sizes}", "your own model with --workload (docs/workloads.md)"])
