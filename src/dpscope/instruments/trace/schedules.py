"""When to record: which steps of a training run the profiler looks at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
        """As `torch.profiler.profile(schedule=…)` wants it."""
        from torch.profiler import schedule

        return schedule(
            skip_first=self.skip_first, wait=self.wait, warmup=self.warmup, active=self.active, repeat=self.repeat
        )


EARLY_TRAINING = Schedule(skip_first=0, wait=0, warmup=1, active=5, repeat=1)
STEADY_STATE = Schedule(skip_first=50, wait=5, warmup=2, active=10, repeat=2)
PERIODIC = Schedule(skip_first=10, wait=5, warmup=2, active=3, repeat=5)

SHORT = "short"  # after the run's own warm-up steps, a few steps: what keeps traces small
SCHEDULES = {SHORT: Schedule(), "early_training": EARLY_TRAINING, "steady_state": STEADY_STATE, "periodic": PERIODIC}


def early_training() -> Callable[[int], Any]:
    """The first steps, where allocations and autotuning happen."""
    return EARLY_TRAINING.to_torch()


def steady_state() -> Callable[[int], Any]:
    """Two stretches of ten steps after fifty, when nothing is new any more."""
    return STEADY_STATE.to_torch()


def periodic() -> Callable[[int], Any]:
    """Three steps, five times over: does a step change as training goes on?"""
    return PERIODIC.to_torch()


def make_schedule(name: str, *, warmup: int, active: int | None = None) -> Schedule:
    """A schedule by name; `short` skips the run's `warmup` steps, and `active` changes how many are recorded."""
    if name not in SCHEDULES:
        raise UserError(f"unknown schedule {name!r}: choose one of {', '.join(SCHEDULES)}")
    schedule = SCHEDULES[name]
    if name == SHORT:
        schedule = replace(schedule, skip_first=warmup)
    return schedule if active is None else replace(schedule, active=active)
