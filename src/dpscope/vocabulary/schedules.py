"""Schedules of a profiler: which steps of a training run it records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from dpscope.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps to skip, then `repeat` cycles of waiting, warming the profiler up, and recording."""

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
        """Return what `torch.profiler.profile(schedule=…)` takes."""
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
