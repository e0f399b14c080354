"""The modules of several methods on few lines: those that cost alike share one, and lines hold most of every cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dpscope.reports.tables import grouped
from dpscope.results.module_names import ancestor, depth_of, is_sum_of_others, layer_numbers, name_of_run, pattern_of

Cost = Mapping[str, float]  # of one module: parts -> bytes or milliseconds
Costs = Mapping[str, Cost]  # of one method: module -> its cost

ALIKE = 1.1  # times the cheapest: still the same, but for what a step happens to do first
LEAST_SHARE = 0.9  # of every method's whole, at least


@dataclass(frozen=True)
class ModuleLine:
    """`modules`: for each method those that the line stands for; none where its results do not list them."""

    name: str
    modules: list[dict[str, Cost]]

    def cost(self, place: int) -> float:
        """Return what its modules cost one method."""
        return sum(map(total, self.modules[place].values()))


def total(cost: Cost) -> float:
    return sum(cost.values())


def choose_lines(methods: Sequence[Costs], most: int) -> list[ModuleLine]:
    """Choose at most so many lines, of one level of modules.

    It is the deepest level at which they hold `LEAST_SHARE` of every method's cost, or the level at which they hold
    most. A module's cost is its own and that of submodules below the level.
    """
    named = [{name: cost for name, cost in costs.items() if not is_sum_of_others(name)} for costs in methods]
    wholes = [sum(map(total, costs.values())) for costs in methods]
    best: list[ModuleLine] = []
    held = -1.0
    for depth in range(max((depth_of(name) for costs in named for name in costs), default=0), 0, -1):
        lines = fold([_to_depth(costs, depth) for costs in named])[:most]
        share = min(
            sum(line.cost(place) for line in lines) / whole if whole else 1.0 for place, whole in enumerate(wholes)
        )
        if share > held + 1e-9:
            best, held = lines, share
        if held >= LEAST_SHARE:
            break
    return best


def _to_depth(costs: Costs, depth: int) -> Costs:
    gathered: dict[str, dict[str, float]] = {}
    for name, cost in costs.items():
        own = gathered.setdefault(ancestor(name, depth), {})
        for part, value in cost.items():
            own[part] = own.get(part, 0.0) + value
    return gathered


def fold(methods: Sequence[Costs]) -> list[ModuleLine]:
    """Return the heaviest in any method first; of equals, in the order of the results."""
    listed = dict.fromkeys(name for costs in methods for name in costs)
    lines = []
    for pattern, names in grouped(listed, pattern_of).items():
        runs = _runs(sorted(names, key=layer_numbers), methods)
        for run in runs:
            modules = [{name: costs[name] for name in run if name in costs} for costs in methods]
            lines.append(ModuleLine(name_of_run(run, pattern if len(runs) == 1 else ""), modules))
    return sorted(lines, key=lambda line: -max(map(line.cost, range(len(methods)))))


def _runs(names: Sequence[str], methods: Sequence[Costs]) -> list[list[str]]:
    """Return runs of neighbours that cost alike in every method."""
    runs: list[list[str]] = []
    for name in names:
        longer = [*(runs[-1] if runs else []), name]
        totals = [[total(costs[each]) for each in longer if each in costs] for costs in methods]
        if runs and all(max(own) <= ALIKE * min(own) for own in totals if own):
            runs[-1] = longer
        else:
            runs.append([name])
    return runs
