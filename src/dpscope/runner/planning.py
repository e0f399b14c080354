"""Plan of a sweep, from options to run specs, and checks before its first row.

It is the one planner of the command line and of `dpscope.compare`. The checks: the workload can be built and trained.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from dpscope.endings import outcome_of_exception
from dpscope.errors import UserError
from dpscope.runner import worker
from dpscope.runner.measure import choose_instruments, resolve_device, their_mistake
from dpscope.runner.spec import RunSpec
from dpscope.runner.sweep import Limits
from dpscope.runner.worker import claim_stdout, limit_memory
from dpscope.vocabulary.instruments import INSTRUMENTS
from dpscope.vocabulary.methods import BUILT_IN, STANDARD, resolve_method
from dpscope.vocabulary.settings import EAGER, LATER_DEFAULTS, SETTINGS, SWEPT
from dpscope.vocabulary.statuses import OOM, REFUSED
from dpscope.workloads.configs import CustomConfig, WorkloadConfig, find_workload, parse_lora, with_lora

# What a comparison is of, unless something else is asked for.
DEFAULT_METHODS = tuple(method.name for method in BUILT_IN)
DEFAULT_BATCH_SIZE = 8
COMPARE_INSTRUMENTS = ("time", "memory")


@dataclass(frozen=True)
class Plan:
    """The rows of a sweep in the order in which they are measured."""

    specs: list[RunSpec]
    instruments: tuple[str, ...]
    remarks: list[str]  # a sentence for each instrument that is left out of "all", or cannot do all it could


def plan_sweep(
    workload: WorkloadConfig | str | Callable[..., Any],
    *,
    methods: Iterable[str] = DEFAULT_METHODS,
    batch_size: int | Iterable[int] = DEFAULT_BATCH_SIZE,
    seq_len: int | Iterable[int] | None = None,
    lora: str | None = None,
    device: str = "auto",
    instruments: str | Iterable[str] | None = None,
    for_other_machine: bool = False,
    **settings: Any,
) -> Plan:
    """Plan a comparison. `settings`: dtype, optimizer, steps, seed … (`RunSpec`), and `options` (`make_sweep`).

    Settings in `SWEPT` (compile, gpus) may be lists. `instruments="all"` selects all that can work on this machine,
    None selects `COMPARE_INSTRUMENTS`; rows of several processes then use only instruments that support them.
    `for_other_machine` plans for a machine with a GPU, whether or not this one has a GPU.
    """
    config = find_workload(workload)
    device = "cuda" if for_other_machine else resolve_device(device)
    choice = choose_instruments(COMPARE_INSTRUMENTS if instruments is None else instruments, device)
    specs = make_sweep(
        config if lora is None else with_lora(config, parse_lora(lora)),
        methods=methods,
        batch_sizes=_several(batch_size),
        seq_lens=[None] if seq_len is None else _several(seq_len),
        instruments=choice.instruments,
        device=device,
        **settings,
    )
    given = {name for name, default in LATER_DEFAULTS.items() if settings.get(name, default) != default}
    if "parallel" in given and all(spec.world_size == 1 for spec in specs):
        how = settings["parallel"]
        raise UserError(f"--parallel {how} is for several processes: add --gpus N, or --simulate-world N")
    if "link_gbps" in given and "simulate_world" not in given:
        raise UserError("--link-gbps is for --simulate-world N: real processes send over the links that they have")
    remarks = list(choice.remarks)
    if device == "cpu" and any(spec.gpus > 1 for spec in specs):
        remarks.append("there is no GPU here: rows of several processes run on the CPU, over gloo, and share its cores")
    if instruments is None or not choice.named:
        unseen = [spec for spec in specs if spec.world_size > 1 and not INSTRUMENTS[spec.instrument].of_ranks]
        specs = [spec for spec in specs if spec not in unseen]
        names = sorted({spec.instrument for spec in unseen})
        remarks += [f"{name} looks at one process: rows of several are left out" for name in names]
    return Plan(specs, choice.instruments, remarks)


def make_sweep(
    workload: WorkloadConfig,
    *,
    methods: Iterable[str],
    batch_sizes: Iterable[int],
    seq_lens: Iterable[int | None],
    instruments: Iterable[str] = ("time",),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> list[RunSpec]:
    """Return the specs of every method, size and instrument, each once.

    `standard` comes first at each size, because it is the denominator.

    Args:
        workload: What is trained.
        methods: Names or aliases.
        batch_sizes: Samples in a batch.
        seq_lens: Sequence lengths; None for the workload's own.
        instruments: How steps are observed.
        options: Instrument -> option -> value.
        **settings: Further settings of `RunSpec`. `compile` and `gpus` may be lists.

    Returns:
        The specs, for `compare`.

    Raises:
        UserError: A name or a setting is wrong.

    Example:
        >>> config = dpscope.make_config("tiny")
        >>> specs = dpscope.make_sweep(config, methods=["standard", "flash"], batch_sizes=[4, 8], seq_lens=[128])
        >>> dpscope.compare(specs)  # doctest: +SKIP
    """
    names = dict.fromkeys(resolve_method(name).name for name in methods)
    swept = [_several(settings.pop(name, SETTINGS[name].default)) for name in SWEPT]
    specs = [
        RunSpec(
            workload=workload,
            method=method,
            batch_size=batch_size,
            seq_len=seq_len,
            instrument=instrument,
            options=(options or {}).get(instrument, {}),
            **settings,
            **dict(zip(SWEPT, values, strict=True)),
        )
        for batch_size in batch_sizes
        for seq_len in seq_lens
        for values in product(*swept)
        for method in sorted(names, key=lambda name: name != STANDARD)
        for instrument in instruments
    ]
    # Of one process without `parallel`, so that it equals the row of other sweeps.
    alone = LATER_DEFAULTS["parallel"]
    return list(dict.fromkeys(spec if spec.world_size > 1 else replace(spec, parallel=alone) for spec in specs))


def _several(values: Any) -> list[Any]:
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]


def require_measurable(specs: Sequence[RunSpec], limits: Limits | None = None) -> None:
    """Raise `UserError` if the workload cannot be trained, or a requested method cannot train it.

    A built-in model is built on torch's meta device, unless its config suffices. The user's own model takes one
    ordinary step in a separate process, so that a fault is reported once instead of in every row.
    """
    private = [spec for spec in specs if resolve_method(spec.method).private]
    smallest = min(private or specs, key=lambda spec: spec.batch_size * (spec.seq_len or 1))
    if isinstance(smallest.workload, CustomConfig):
        _require_in_child(smallest, limits or Limits())
    elif smallest.checkpoint_blocks or not smallest.workload.is_known_trainable:
        require_buildable(smallest)


def require_buildable(spec: RunSpec) -> None:
    import torch
    from torch.overrides import TorchFunctionMode

    from dpscope.trainers.base import NotPrivateError, require_private_trainable
    from dpscope.trainers.modes import checkpoint_blocks
    from dpscope.workloads.workload import build_model, build_workload

    class Uninitialised(TorchFunctionMode):
        """Mode that skips initial values: to make them, torch would import its compiler, which is slow."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(function, "__module__", None) == torch.nn.init.__name__:
                return args[0] if args else kwargs["tensor"]
            return function(*args, **(kwargs or {}))

    workload = build_workload(spec.workload, batch_size=spec.batch_size, seq_len=spec.seq_len)
    try:
        with torch.device("meta"), Uninitialised():
            model = build_model(workload, spec.param_dtype)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise UserError(
            f"model {spec.workload.name!r} is larger than any memory ({error}): give smaller sizes"
        ) from None
    if spec.checkpoint_blocks:
        checkpoint_blocks(model)
    if not resolve_method(spec.method).private:
        return
    try:
        require_private_trainable(model)
    except NotPrivateError as error:
        raise UserError(f"model {spec.workload.name!r} {error}. Or compare --methods standard alone") from None


def _require_in_child(spec: RunSpec, limits: Limits) -> None:
    command = [sys.executable, "-m", "dpscope.runner.planning"]
    request = json.dumps({"spec": spec.to_dict(), "memory_limit": limits.memory})
    name = spec.workload.name
    options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "timeout": limits.timeout}
    try:
        child = subprocess.run(command, input=request, check=False, **options)
    except subprocess.TimeoutExpired:
        sentence = f"{name} took no ordinary step within {limits.in_words}: raise --timeout, or see where it waits"
        raise UserError(sentence) from None
    if child.returncode == REFUSED:
        raise UserError(child.stdout.rstrip())
    if child.returncode and child.returncode != -signal.SIGKILL:  # killed for memory: the rows will say so
        raise UserError(
            f"{name} ended its process with code {child.returncode} before its first step was done:\n"
            f"{child.stderr.rstrip()}"
        )


def explain(spec: RunSpec) -> str | None:
    """Explain what is wrong with the user's workload; None if no fault was found before measuring."""
    from dpscope.runner.steps import assemble

    try:
        trainer, batches = assemble(replace(spec, method=STANDARD, compile=EAGER))
        trainer.train_step(*batches)
    except UserError as error:
        return str(error)
    except (Exception, SystemExit) as error:
        if outcome_of_exception(error)[0] != OOM:
            short = "".join(traceback.format_exception_only(error))
            return their_mistake(error, spec.workload) or f"{spec.workload.name} failed:\n{short}"
    try:
        require_buildable(spec)
    except UserError as error:
        return str(error)
    except Exception:
        pass  # it may not be made for the meta device; the rows will tell
    return None


def main() -> None:
    worker.rest_collector()
    results = claim_stdout()
    request = json.loads(sys.stdin.readline())
    if request["memory_limit"] is not None:
        limit_memory(int(request["memory_limit"]))
    if sentence := explain(RunSpec.from_dict(request["spec"])):
        print(sentence, file=results, flush=True)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()
