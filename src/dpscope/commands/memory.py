"""`dpscope memory`: where every byte of the peak goes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from dpscope.commands.sweeping import follow_sweep, plan_from, sweep_arguments
from dpscope.errors import UserError


@click.command(name="memory")
@sweep_arguments
@click.option("--memory-viz", is_flag=True, help="Also write a file for PyTorch's memory_viz page (CUDA).")
@click.option("--rule", help="FILE.py:function or package.module:function that names a component for a storage.")
def command(memory_viz: bool, rule: str | None, **options: Any) -> None:
    """Memory by component: what each method's peak is made of, over time and by module.

    \b
    dpscope memory
    dpscope memory --model 1b --dtype bf16 --batch-size 8 --seq-len 1024
    dpscope memory --methods standard,ghost --rule mine.py:attention_scores
    """
    asked = {"memory": instrument_options(memory_viz, rule)}
    specs = plan_from(options, instruments=("memory",), instrument_options=asked).specs
    if memory_viz and specs[0].device != "cuda":
        raise UserError("--memory-viz records the CUDA allocator: leave it out on the CPU")
    comparison = follow_sweep("memory", specs, **options)
    sys.exit(0 if comparison.ok else 1)


def instrument_options(memory_viz: bool, rule: str | None) -> dict[str, Any]:
    """A rule's file is named in full: the measurement runs in a process of its own."""
    if rule is None:
        return {"memory_viz": memory_viz}
    source, colon, name = rule.rpartition(":")
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise UserError(f"--rule {rule!r}: there is no file {source}")
        source = str(Path(source).resolve())
    elif not (source and name):
        raise UserError(f"--rule {rule!r}: expected FILE.py:function or package.module:function")
    return {"memory_viz": memory_viz, "rule": f"{source}{colon}{name}"}
