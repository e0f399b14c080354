"""Plan of a sweep, from options to run specs: the one planner of the command line and of `dpscope.compare`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from dpscope.errors import UserError
from dpscope.runner.environment import resolve_device
from dpscope.runner.measure import choose_instruments
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.instruments import INSTRUMENTS
from dpscope.vocabulary.methods import BUILT_IN, STANDARD, resolve_method
from dpscope.vocabulary.settings import LATER_DEFAULTS, SETTINGS, SWEPT
from dpscope.workloads.configs import WorkloadConfig, find_workload, parse_lora, with_lora

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
    _require_several(specs, settings)
    remarks = list(choice.remarks)
    if device == "cpu" and any(spec.gpus > 1 for spec in specs):
        remarks.append("there is no GPU here: rows of several processes run on the CPU, over gloo, and share its cores")
    if instruments is None or not choice.named:
        unseen = {spec.instrument for spec in specs if not _can_be_seen(spec)}
        specs = [spec for spec in specs if _can_be_seen(spec)]
        remarks = [*remarks, *(f"{name} looks at one process: rows of several are left out" for name in sorted(unseen))]
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
    return list(dict.fromkeys(map(_of_one_process, specs)))


def _can_be_seen(spec: RunSpec) -> bool:
    return spec.world_size == 1 or INSTRUMENTS[spec.instrument].of_ranks


def _of_one_process(spec: RunSpec) -> RunSpec:
    """Return the spec without `parallel` if it has one process, so that it equals the row of other sweeps."""
    return spec if spec.world_size > 1 else replace(spec, parallel=LATER_DEFAULTS["parallel"])


def _require_several(specs: Iterable[RunSpec], settings: Mapping[str, Any]) -> None:
    """Raise `UserError` for settings of several processes if every row has one process."""
    given = {name for name, default in LATER_DEFAULTS.items() if settings.get(name, default) != default}
    if "parallel" in given and all(spec.world_size == 1 for spec in specs):
        how = settings["parallel"]
        raise UserError(f"--parallel {how} is for several processes: add --gpus N, or --simulate-world N")
    if "link_gbps" in given and "simulate_world" not in given:
        raise UserError("--link-gbps is for --simulate-world N: real processes send over the links that they have")


def _several(values: Any) -> list[Any]:
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]
