"""`dpscope check`: tests if a method is exact on a workload."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console

from dpscope.commands.options import (
    ABOVE_ZERO,
    CommaList,
    json_option,
    setting_option,
    workload_from,
    workload_options,
    write_json,
)
from dpscope.commands.sweeping import make_console
from dpscope.endings import leave, outcome_of_exception
from dpscope.errors import UserError
from dpscope.runner.measure import resolve_device, their_mistake
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.methods import resolve_method
from dpscope.vocabulary.settings import CLIPPING_RULES, COMPILE_MODES, SETTINGS
from dpscope.vocabulary.statuses import OOM
from dpscope.workloads.configs import WorkloadConfig

# What torch says of operators that vmap runs sample by sample. The report has a sentence of its own for such modules.
SLOW_VMAP = "There is a performance drop because we have not yet implemented the batching rule"

SECONDS_BETWEEN_LINES = 15.0

# Settings of the steps that are checked.
OF_A_STEP = ("accumulate", "checkpoint_blocks", "compile", "cuda_graph", "clipping", "seed")


@click.command(name="check")
@click.option("--methods", type=CommaList(str), help="Which methods to check [default: every private one].")
@workload_options
@click.option("--batch-size", type=int, default=4, show_default=True, help="Samples in a batch.")
@click.option("--seq-len", type=int, help="Sequence length [default: 32 or the model's].")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "fp64"]),
    default="fp32",
    show_default=True,
    help="Number format of the methods; what they are held against is always float64.",
)
@click.option("--max-grad-norm", type=ABOVE_ZERO, help="The middle clip norm [default: half of the samples exceed it].")
@click.option("--tolerance", type=ABOVE_ZERO, help="Relative error that is exact [default: 1e-5, 1e-9 in fp64].")
@click.option(
    "--neighbours/--no-neighbours",
    default=True,
    show_default=True,
    help="Try neighbouring batches, the noise and the accountant, too.",
)
@click.option(
    "--sizes",
    type=CommaList(int),
    help="Batch sizes for that [default: those that coincide with another length of the model].",
)
@setting_option("accumulate")
@setting_option("checkpoint_blocks")
@setting_option("clipping", one=True, help=f"{'|'.join(CLIPPING_RULES)}: the clipping rule that is checked.")
@setting_option("compile", one=True, help=f"{'|'.join(COMPILE_MODES)}: check methods on a compiled model.")
@setting_option("cuda_graph", one=True, help="Check steps that replay a CUDA graph (flash).")
@setting_option("gpus", one=True, help="Hold a run on N ranks, noise included, against one process, instead.")
@setting_option("parallel")
@setting_option("seed", help="Of weights and data.")
@setting_option("device")
@click.option("--paths", is_flag=True, help="Show which path each parameter's norms take (flash).")
@click.option("--time-paths", is_flag=True, help="Show that, with what each path takes on this device, measured.")
@json_option
def command(
    methods: list[str] | None, batch_size: int, device: str, paths: bool, json_file: Path | None, **options: Any
) -> None:
    """Compare each method's norms, factors and clipped sums with one sample at a time through plain autograd.

    Then test its steps on neighbouring batches, its noise and its accountant. Exit code 0: every method that ran is
    exact and breaches nothing. 1: a method is not exact or breaches privacy, or none ran. 2: wrong usage, or it cannot
    be checked.
    """
    config = workload_from(options)
    seq_len = options.pop("seq_len")
    if seq_len is None and (usual := config.resolve_seq_len(None)):
        seq_len = min(32, usual)
    spec = RunSpec(  # for its checks of what was asked for
        workload=config,
        method=methods[0] if methods else "flash",
        batch_size=batch_size,
        seq_len=seq_len,
        device=resolve_device(device),
        **{name: options.pop(name) for name in (*OF_A_STEP, "gpus", "parallel")},
    )
    if spec.gpus > 1:
        _check_ranks(spec, methods, json_file, paths=paths, **options)

    from dpscope.exactness.check import check
    from dpscope.exactness.report import describe_check
    from dpscope.workloads.workload import build_workload

    console = make_console()
    with _progress(console) as report, _their_mistakes(config), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=SLOW_VMAP)
        found = check(
            build_workload(config, batch_size=spec.logical_batch_size, seq_len=spec.seq_len),
            methods,
            name=", ".join(_described(spec)),
            progress=report,
            **{name: getattr(spec, name) for name in (*OF_A_STEP, "batch_size", "device")},
            **options,  # dtype, max_grad_norm, tolerance, neighbours, sizes, time_paths
        )
    console.print(describe_check(found, paths=paths or options["time_paths"]), highlight=False, markup=False)
    if json_file:
        write_json(json_file, found.to_json())
        console.print(f"Written: {json_file}", highlight=False, markup=False)
    leave(found.ok)


def _check_ranks(
    spec: RunSpec,
    methods: list[str] | None,
    json_file: Path | None,
    *,
    dtype: str,
    max_grad_norm: float | None,
    tolerance: float | None,
    **others: Any,
) -> NoReturn:
    """Compare runs on several ranks with one process, method by method."""
    from dpscope.runner.rank_check import check_ranks

    given = [name for name in ("paths", "time_paths", "sizes") if others[name]]
    if given or not others["neighbours"]:
        name = (given or ["no_neighbours"])[0].replace("_", "-")
        raise UserError(f"--{name} is of a check in one process: leave it out, or leave out --gpus")
    if max_grad_norm is not None:
        spec = replace(spec, max_grad_norm=max_grad_norm)
    console, found = make_console(), []
    with _progress(console) as report:
        for method in methods or ["flash"]:
            report(f"{method} on {spec.gpus} ranks")
            found.append(check_ranks(replace(spec, method=resolve_method(method).name), dtype, tolerance))
    for ranks in found:
        console.print(str(ranks), highlight=False, markup=False)
    ok = any(ranks.ran for ranks in found) and all(ranks.ok for ranks in found if ranks.ran)
    if json_file:
        figures = {"ok": ok, "ranks": spec.gpus, "methods": [ranks.to_dict() for ranks in found]}
        write_json(json_file, json.dumps(figures, indent=2) + "\n")
        console.print(f"Written: {json_file}", highlight=False, markup=False)
    leave(ok)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Return a function that reports progress: in place on a terminal, else as occasional lines on standard error."""
    if console.is_terminal:
        with console.status("") as status:
            yield lambda what: status.update(f"checking: {what}")
        return
    said = time.monotonic()  # a check that is done soon says nothing but its result

    def report(what: str) -> None:
        nonlocal said
        if time.monotonic() - said >= SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            click.echo(f"checking: {what}", err=True)

    yield report


def _described(spec: RunSpec) -> Iterator[str]:
    """Yield words for what is checked: the model, its sequence length, and unusual settings of a step."""
    yield spec.workload.name
    if spec.seq_len is not None:
        yield f"sequence {spec.seq_len}"
    changed, told = spec.changed(), ("checkpoint_blocks", "compile", "cuda_graph", "clipping")
    yield from (SETTINGS[name].in_words(changed) for name in told if name in changed)
    if spec.accumulate > 1:
        yield f"{spec.accumulate} batches of {spec.batch_size} a step"


@contextmanager
def _their_mistakes(config: WorkloadConfig) -> Iterator[None]:
    """Turn an error in the user's workload into a `UserError` with their traceback."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        status, reason = outcome_of_exception(error)
        sentence = reason if status == OOM else their_mistake(error, config)
        if sentence is None:
            raise
        raise UserError(sentence) from None
