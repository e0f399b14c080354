"""`dpscope check`: is a method exact on this workload?"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from dpscope.commands.console import make_console
from dpscope.commands.options import CommaList, resolve_device, workload_from, workload_options
from dpscope.runner.preflight import require_measurable
from dpscope.runner.spec import RunSpec
from dpscope.trainers.registry import methods as all_methods
from dpscope.trainers.registry import resolve_method

if TYPE_CHECKING:
    from dpscope.runner.exactness import Exactness


@click.command(name="check")
@click.option("--methods", type=CommaList(str), help="Which methods to check [default: every private one].")
@workload_options
@click.option("--batch-size", type=int, default=4, show_default=True, help="Samples in the batch.")
@click.option("--seq-len", type=int, help="Sequence length [default: 64 or the model's].")
@click.option("--max-grad-norm", type=float, help="Clip norm [default: one that half of the samples exceed].")
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights and data.")
@click.option("--device", default="auto", show_default=True, help="auto|cpu|cuda.")
@click.option("--paths", is_flag=True, help="Show which path each parameter's norms take (flash).")
def command(
    methods: list[str] | None,
    batch_size: int,
    seq_len: int | None,
    max_grad_norm: float | None,
    device: str,
    paths: bool,
    **options: Any,
) -> None:
    """Hold each method's clipped gradient against micro-batches of one: one sample at a time, plain autograd.

    Exact means a relative error of at most 1e-5 for every parameter, in float32. Exit code 1 if a method is not, or if
    no sample was clipped: then nothing was checked that ordinary training does not do as well.
    """
    workload = workload_from(options)
    if seq_len is None and workload.kind == "transformer":
        seq_len = min(64, workload.resolve_seq_len(None) or 64)
    names = methods or [name for name, method in all_methods().items() if method.private]
    resolved = list(dict.fromkeys(resolve_method(name).name for name in names))
    base = RunSpec(
        workload=workload,
        method=resolved[0],
        batch_size=batch_size,
        seq_len=seq_len,
        device=resolve_device(device),
        max_grad_norm=1.0 if max_grad_norm is None else max_grad_norm,
        **options,
    )
    specs = [replace(base, method=name) for name in resolved]
    require_measurable(specs)

    from dpscope.runner.exactness import check_method, run_oracle_of, telling_clip_norm

    console = make_console()
    oracle = run_oracle_of(base)
    if max_grad_norm is None:
        specs = [replace(spec, max_grad_norm=telling_clip_norm(oracle)) for spec in specs]
        oracle = run_oracle_of(specs[0])
    clipped = int((oracle.factors < 1).sum())
    low, high = float(oracle.norms.min()), float(oracle.norms.max())
    console.print(
        f"{workload.name}, batch {batch_size}: per-sample norms {low:.4g} to {high:.4g}, clip norm "
        f"{specs[0].max_grad_norm:.4g}, {clipped} of {batch_size} samples are clipped",
        highlight=False,
        markup=False,
    )
    results = [check_method(spec, oracle) for spec in specs]
    for result in results:
        console.print(_verdict(result), highlight=False, markup=False)
        if paths and result.paths is not None:
            console.print(f"\n{result.paths}\n", highlight=False, markup=False, soft_wrap=True)
    if not clipped:
        console.print("clipping was not exercised: give --max-grad-norm", highlight=False, markup=False)
    sys.exit(0 if clipped and all(result.exact for result in results) else 1)


def _verdict(result: Exactness) -> str:
    name, error = result.worst
    word = "exact" if result.exact else "NOT EXACT"
    return f"{result.method}: {word}; largest relative error {error:.1e}, of {name} ({len(result.errors)} parameters)"
