"""`dpscope plan`: what private training will take, before anything is rented or run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from dpscope.commands.check import _their_mistakes
from dpscope.commands.options import (
    CommaList,
    json_option,
    require_folder,
    setting_option,
    workload_from,
    workload_options,
    write_json,
)
from dpscope.commands.sweeping import make_console, name_files
from dpscope.endings import leave
from dpscope.plain_text import as_json
from dpscope.runner.planning import DEFAULT_METHODS

# Settings of a step that a plan heeds.
PLANNED_SETTINGS = (
    *("dtype", "param_dtype", "checkpoint_blocks", "compile", "cuda_graph", "accumulate", "gpus", "parallel"),
    *("link_gbps", "memory_budget", "optimizer", "seed"),
)


@click.command(name="plan")
@workload_options
@click.option(
    "--methods", type=CommaList(str), default=",".join(DEFAULT_METHODS), show_default=True, help="What to plan."
)
@click.option("--seq-len", type=int, help="Sequence length [default: 256 or the model's].")
@click.option("--gpu", "card", metavar="NAME", help="The card [default: the smallest that fits --batch-size].")
@click.option("--batch-size", type=int, help="Samples in a physical batch [default: the largest that fits].")
@click.option("--logical-batch", type=int, help="Expected samples in a step [default: 256].")
@click.option("--samples", type=int, help="Samples in the training set.")
@click.option("--epsilon", type=float, help="Privacy budget [default: found from the noise].")
@click.option("--delta", type=float, help="[default: 1 / (10 × samples)].")
@click.option("--noise-multiplier", type=float, help="Noise per clip norm [default: found from epsilon].")
@click.option("--epochs", type=float, help="Passes over the data [default: what epsilon or hours allow].")
@click.option("--hours", type=float, help="Train as long as this allows.")
@click.option("--price-per-hour", type=float, help="Of the card.")
@click.option(
    "--accountant", type=click.Choice(["prv", "rdp"]), default="prv", show_default=True, help="Which one σ is for."
)
@click.option("--probe", "probing", is_flag=True, help="Measure short steps on this machine's GPU, and extrapolate.")
@click.option("--effects/--no-effects", default=True, show_default=True, help="Find out what would change most.")
@json_option
@click.option(
    "--html", "page_file", type=click.Path(path_type=Path, dir_okay=False), help="Write the plan as a page here."
)
def command(
    seq_len: int | None,
    methods: list[str],
    probing: bool,
    effects: bool,
    json_file: Path | None,
    page_file: Path | None,
    **options: Any,
) -> None:
    """Predict peak, largest batch, time and privacy of each method on a card that need not be here.

    \b
    dpscope plan --model hf:llama --dtype bf16 --seq-len 2048 --samples 100000 --epsilon 8 --epochs 3 --gpu h100-80gb
    dpscope plan --model 1b --dtype bf16 --batch-size 16            the smallest card
    dpscope plan --model 1b --gpu a100-80gb --samples 50000 --noise-multiplier 0.8 --epsilon 4     the epochs
    dpscope plan --model 1b --dtype bf16 --probe                    measured on this GPU, at small batches

    Exit codes: 0 a method fits, 1 none does, 2 wrong usage.
    """
    config = workload_from(options)
    settings = {name: options.pop(name) for name in PLANNED_SETTINGS}
    require_folder(page_file)
    from dpscope.forecast.plan import plan
    from dpscope.reports.plan_text import describe_plan, plan_page

    prober = None
    if probing:
        from dpscope.forecast.probe import local_card, probe_in_process

        prober = probe_in_process
        options["card"] = local_card(options["card"])
    length = seq_len if seq_len is not None or (usual := config.resolve_seq_len(None)) is None else min(256, usual)
    console = make_console()
    with console.status("planning") as status, _their_mistakes(config):

        def say(line: str) -> None:
            status.update(f"planning: {line}")
            if not console.is_terminal:
                click.echo(f"  {line}", err=True)

        found = plan(
            config,
            methods=methods,
            seq_len=length,
            say=say,
            prober=prober,
            effects=effects,
            workers=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
            settings=settings,
            **options,
        )
    console.print(describe_plan(found), highlight=False, markup=False, soft_wrap=True)
    written = []
    if json_file is not None:
        write_json(json_file, as_json({"document": "dpscope.plan", "version": 1, **found}))
        written += [json_file] if str(json_file) != "-" else []
    if page_file is not None:
        write_json(page_file, plan_page(found))
        written.append(page_file)
    if written:
        name_files(console, written)
    leave(found["fits"])


for _name in reversed(PLANNED_SETTINGS):
    command = setting_option(_name, one=True)(command)
