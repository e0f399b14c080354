"""Privacy that a run has spent: the history of its steps, and what makes ε doubtful.

An accountant's ε holds if every step was one Poisson draw at the accounted rate. `Spending` counts steps and draws
of one `make_private`, to detect a run on other batches or beyond its target.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.utils.data import Sampler

from dpscope.flash.update.noise_source import old_noise

# In the first parameter group of a saved optimizer, which any optimizer keeps that loads the state. A string of JSON.
PRIVATE_RUN = "dpscope_private_run"
OLD_HISTORY, OLD_NOISE = "dpscope_privacy_history", "dpscope_noise_generator"  # in states of earlier versions

History = list[tuple[float, float, int]]  # of an accountant: noise multiplier, sample rate, number of steps


def count_draws(sampler: Any) -> None:
    """Make a batch sampler count its passes over the data as `passes`, and its draws as `draws_given`.

    Loaders derived from the private one (BatchMemoryManager, Accelerate, padding) keep its batch sampler. A list of
    batches, without Poisson sampling, counts nothing.
    """
    kind: Any = type(sampler)
    if isinstance(sampler, Sampler) and not hasattr(kind, "draws_given"):
        sampler.__class__ = _counting(kind)


@cache
def _counting(kind: Any) -> Any:
    class Counting(kind):
        passes = draws_given = 0

        def __iter__(self) -> Iterator[list[int]]:
            self.passes += 1
            for draw in super().__iter__():
                self.draws_given += 1
                yield draw

    Counting.__name__ = Counting.__qualname__ = kind.__name__
    return Counting


@dataclass(eq=False)
class Spending:
    """The privacy that a private optimizer spends: it tells the accountant before each update, and counts.

    account     the accountant's own hook
    accountant  the accountant
    sampler     the private loader's batch sampler, if it counts draws
    """

    account: Callable[[Any], None]
    accountant: Any
    sampler: Any | None
    steps: int = 0
    planned: int | None = None  # steps that the target ε was made for
    target: float = 0.0

    def count(self, optimizer: Any) -> None:
        """Count a step. The accountant is told by the hook of `attach_step_hook`, and by this if that was replaced."""
        before = self._last()
        if optimizer.step_hook is not None:
            optimizer.step_hook(optimizer)
        if self._last() == before:
            self.account(optimizer)
        self.steps += 1
        if self.planned is not None and self.steps == self.planned + 1:
            warnings.warn(self._beyond_target(), stacklevel=2)

    def _last(self) -> tuple[int, list[Any]]:
        """Return what each step changes in the accountant's history."""
        history = self.accountant.history
        return len(history), list(history[-1:])

    def plan(self, steps: int, target_epsilon: float) -> None:
        """Remember the number of steps and the ε for which the noise was chosen."""
        self.planned, self.target = steps, target_epsilon

    def doubts(self, history: Sequence[Sequence[float]]) -> list[str]:
        """Return a sentence for each reason why ε, which is of `history`, does not hold or is above the target."""
        found = []
        counted = sum(steps for _, _, steps in as_steps(history))
        if counted < self.steps:
            found.append(
                f"the accountant knows of {counted} steps, and {self.steps} private steps were taken: ε is larger. Its "
                "history was cleared, or privacy_engine.accountant was replaced after make_private"
            )
        elsewhere = 0 if self.sampler is None else self.steps - self.sampler.draws_given
        if elsewhere > 0:
            found.append(
                f"{elsewhere} of {self.steps} private steps were taken on batches that did not come from the private "
                "loader: ε takes each batch to be a Poisson draw, and does not hold for them. Train on the data loader "
                "that make_private returned (inside a Trainer, use dpscope.transformers)"
            )
        if self.planned is not None and self.steps > self.planned:
            found.append(self._beyond_target())
        return found

    def _beyond_target(self) -> str:
        return (
            f"the noise was chosen for {self.planned} steps to stay within target_epsilon={self.target:g}, and step "
            f"{self.steps} was taken: ε is larger than the target. Give make_private_with_epsilon the number of epochs "
            "that are trained, or stop"
        )


def without_runs(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an optimizer's state without the private runs in it, and these: history, noise and bounds of each."""
    state, groups = dict(state_dict), [dict(group) for group in state_dict["param_groups"]]
    runs = [json.loads(group.pop(PRIVATE_RUN)) for group in groups if PRIVATE_RUN in group]
    history, noise = state.pop(OLD_HISTORY, []), state.pop(OLD_NOISE, None)
    if history or noise:
        runs.append({"history": history, "bounds": [], **old_noise(noise)})
    return {**state, "param_groups": groups}, runs


def continued(current: Sequence[Sequence[float]], saved: Sequence[Sequence[float]]) -> History:
    """Return the history of a run that loads the state of another: never less than either.

    If one is the beginning of the other, it is contained in it: the state was saved by this run, or is loaded twice.
    Otherwise they are different steps on the data, and both count.
    """
    now, before = as_steps(current), as_steps(saved)
    if _begins(now, before):
        return now
    if _begins(before, now):
        return before
    return before + now


def as_steps(history: Sequence[Sequence[float]]) -> History:
    return [(float(noise), float(rate), int(steps)) for noise, rate, steps in history]


def _begins(whole: History, part: History) -> bool:
    """Return True if `part` is the beginning of `whole`; its last entry may have fewer steps."""
    if not part:
        return True
    *first, (noise, rate, steps) = part
    return (
        len(part) <= len(whole)
        and first == whole[: len(first)]
        and whole[len(first)][:2] == (noise, rate)
        and whole[len(first)][2] >= steps
    )
