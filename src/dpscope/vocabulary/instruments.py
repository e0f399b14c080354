"""Instruments: how a step can be observed, and their options. docs/architecture.md says how to add one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dpscope import numbers
from dpscope.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Schedule of steps: skip some, then `repeat` cycles of waiting, warming up the profiler, and recording."""

    skip_first: int = 0
    wait: int = 0
    warmup: int = 1  # recorded and thrown away: the profiler's own start-up is in them
    active: int = 2
    repeat: int = 1

    @property
    def steps(self) -> int:
        """All steps that have to run."""
        return self.skip_first + self.repeat * (self.wait + self.warmup + self.active)

    def to_torch(self) -> Callable[[int], Any]:
        """Return the schedule for `torch.profiler.profile(schedule=…)`."""
        from torch.profiler import schedule

        return schedule(**asdict(self))


SHORT = "short"
SCHEDULES = {
    SHORT: Schedule(),  # two steps after the run's own warm-up: what keeps traces small
    "early_training": Schedule(active=5),  # the first steps, where allocations and autotuning happen
    "steady_state": Schedule(skip_first=50, wait=5, warmup=2, active=10, repeat=2),  # when nothing is new any more
    "periodic": Schedule(skip_first=10, wait=5, warmup=2, active=3, repeat=5),  # does a step change in training?
}

# For `torch.profiler.profile(schedule=steady_state())`.
early_training = SCHEDULES["early_training"].to_torch
steady_state = SCHEDULES["steady_state"].to_torch
periodic = SCHEDULES["periodic"].to_torch


def make_schedule(name: str, *, warmup: int, active: int | None = None) -> Schedule:
    """Return a schedule by name; `short` skips the run's `warmup` steps, and `active` changes how many are recorded."""
    if name not in SCHEDULES:
        raise UserError(f"unknown schedule {name!r}: choose one of {', '.join(SCHEDULES)}")
    schedule = SCHEDULES[name]
    if name == SHORT:
        schedule = replace(schedule, skip_first=warmup)
    return schedule if active is None else replace(schedule, active=active)


@dataclass(frozen=True)
class Option:
    """Option of an instrument and of its subcommand. It is a switch if it is off by default."""

    default: Any
    help: str
    check: Callable[[object], int | float] | None = None  # of a number
    choices: tuple[str, ...] = ()  # of a word
    metavar: str | None = None

    def checked(self, name: str, value: Any) -> Any:
        """Return the validated value. An option without a check accepts its default, or a value of the same type."""
        if value is self.default:
            return value
        if self.check is not None:
            return self.check(value)
        wanted = str if self.default is None else type(self.default)
        if not isinstance(value, wanted):
            raise UserError(f"option {name!r} must be a {wanted.__name__}, not {value!r}")
        return value


@dataclass(frozen=True, kw_only=True)
class Instrument:
    """Description of an instrument, without loading it."""

    shows: str  # what a page lacks without it
    summary: str = ""  # of its subcommand in `dpscope --help`; one without has none
    options: Mapping[str, Option] = field(default_factory=dict)
    with_time: bool = False  # does its subcommand time each method too, in a process of its own?
    gpu_only: bool = False
    of_ranks: bool = False  # can it look at rows of several processes?
    instead: str = ""  # what it does where it cannot work (`obstacle` of its measurement) [default: it is left out]
    cpu_note: str = ""  # what a page says of what it shows on a CPU

    @property
    def works_everywhere(self) -> bool:
        return not (self.gpu_only or self.instead)


ALL_RANKS = "all"

INSTRUMENTS: dict[str, Instrument] = {
    "time": Instrument(shows="Step time", of_ranks=True),
    "memory": Instrument(
        summary="Where every byte of the peak goes: memory by component, by module, over time.",
        shows="Memory by component and over the step",
        options={
            "memory_viz": Option(False, "Also write a file for PyTorch's memory_viz page (CUDA)."),
            "rule": Option(None, "FILE.py:function or package.module:function that names a component for a storage."),
        },
    ),
    "ncu": Instrument(
        summary="Nsight Compute: the bytes that a step moves through DRAM and L2, by method.",
        shows="DRAM bytes and the roofline",
        options={
            "per_kernel": Option(False, "Also kernel by kernel: which of them move the bytes, by phase."),
            "kernel": Option("", "Per kernel, and only those whose name matches.", metavar="REGEX"),
            "top": Option(30, "Kernels shown one by one.", numbers.WholeNumber("--top", 1, 10**6)),
            "budget": Option(
                120.0, "Seconds for kernels one by one.", numbers.RealNumber("--budget, in seconds,", 1e-3, 1e7)
            ),
            "metrics": Option("", "More metrics to collect, as ncu or nvprof names them: a,b."),
            "require_measured": Option(False, "A row that ncu cannot count is not ok; no estimate instead."),
        },
        with_time=True,
        instead="bytes are estimated from tensor sizes, not counted",
        cpu_note="≈ estimate: on a CPU nothing counts bytes",
    ),
    "nsys": Instrument(
        summary="Timelines of a few steps with Nsight Systems: GPU time by phase, kernels, copies, idle gaps.",
        shows="The timeline of kernels and idle gaps",
        options={
            # the first begins with an idle GPU, the others follow each other
            "captured_steps": Option(
                3,
                "Steps on the timeline, after the warm-up (--steps has no part in it).",
                numbers.WholeNumber("captured steps", 1, 1000),
            ),
            "trace": Option("cuda,nvtx,osrt,cudnn,cublas", "What nsys records."),
            "autograd": Option(False, "An NVTX range for every operator: large, and slower on the host."),
            "cpu_sampling": Option(False, "Sample the host's threads too: needs permission, slows the host."),
            "gpu_metrics": Option(False, "Utilisation of the GPU's units too: needs permission for counters."),
        },
        gpu_only=True,
    ),
    "trace": Instrument(
        summary=(
            "Where a step's time goes: torch.profiler traces, phases, kernels, and what a method adds to standard."
        ),
        shows="Phases and operators",
        options={
            "schedule": Option(
                SHORT,
                "Which steps are recorded: two after the warm-up, the first, later ones, or some again and again.",
                choices=tuple(SCHEDULES),
            ),
            "trace_steps": Option(
                None,
                "Steps to record in a row [default: the schedule's].",
                numbers.WholeNumber("--trace-steps", 1, 1000),
            ),
            "shapes": Option(False, "Record the shapes and number formats of operators' inputs."),
            "memory": Option(False, "Record allocations and frees, by operator."),
            "stacks": Option(False, "Record Python stacks: waits are shown with file and line."),
            "modules": Option(False, "A range around every module: the most expensive ones are named."),
            "rank": Option(
                "0", "Of several processes (--gpus), which are recorded: rank 0, or all.", choices=("0", ALL_RANKS)
            ),
            "flops": Option(False, "Count the floating-point operations of matrix products and convolutions."),
        },
        with_time=True,
        of_ranks=True,
    ),
}


def changed_options(instrument: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from their defaults, in a fixed order: equal requests are equal specs."""
    known = INSTRUMENTS[instrument].options
    if foreign := sorted(set(options) - set(known)):
        allowed = f"it knows {', '.join(known)}" if known else "it has none"
        raise UserError(f"instrument {instrument!r} has no option {', '.join(foreign)}: {allowed}")
    checked = {name: option.checked(name, options[name]) for name, option in known.items() if name in options}
    return {name: value for name, value in checked.items() if value != known[name].default}


# What the summary tells of them, in its order: an instrument, and its section as `module:function` below `reports/`.
SECTIONS = (
    ("time", "text:ranks_section"),
    ("memory", "memory.text:memory_section"),
    ("memory", "memory.text:tensor_section"),
    ("trace", "trace.text:trace_section"),
    ("nsys", "trace.text:nsys_section"),
    ("ncu", "traffic.text:traffic_section"),
)
DETAILS = (("memory", "memory.text:snapshot_section"),)  # for the file, where there is room
