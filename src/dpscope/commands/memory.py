"""`dpscope memory`: where every byte of the peak goes."""

from __future__ import annotations

from typing import Any

import click

from dpscope.commands.sweeping import follow_sweep, instrument_arguments, plan_instrument
from dpscope.endings import leave
from dpscope.errors import UserError
from dpscope.runner.measurements.memory import resolve_rule


@click.command(name="memory")
@instrument_arguments("memory")
def command(**options: Any) -> None:
    """Show memory by component: what each method's peak is made of, over time and by module.

    \b
    dpscope memory
    dpscope memory --model 1b --dtype bf16 --batch-size 8 --seq-len 1024
    dpscope memory --methods standard,ghost --rule mine.py:attention_scores
    """
    if options["rule"] is not None:
        options["rule"] = resolve_rule(options["rule"])
    viz = options["memory_viz"]
    specs = plan_instrument(options, "memory")
    if viz and specs[0].device != "cuda":
        raise UserError("--memory-viz records the CUDA allocator: leave it out on the CPU")
    leave(follow_sweep("memory", specs, **options).ok)
