"""Names of modules as results have them: dotted, with layer numbers; names that are no modules are in brackets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dpscope.reports.looks import in_prose, looks_of
from dpscope.reports.memory.figures import unit_for
from dpscope.reports.memory.text import composition_of
from dpscope.reports.page.chart import Table, View, chart_by_size
from dpscope.reports.tables import Row, grouped
from dpscope.reports.trace.data import on_gpu, traced_steps
from dpscope.units import format_bytes, format_ms
from dpscope.vocabulary.components import component_named

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a dotted name
SUMS = re.compile(r"\((\d+ )?others?\)")  # what instruments call the modules that they do not list


def is_summary(name: str) -> bool:
    """Return whether the name stands for no module, like `(outside the modules)`."""
    return name.startswith("(")


def is_sum_of_others(name: str) -> bool:
    return SUMS.fullmatch(name) is not None


def ancestor(name: str, depth: int) -> str:
    """Return the module's ancestor at a depth, or the module itself."""
    return name if is_summary(name) else ".".join(name.split(".")[:depth])


def pattern_of(name: str) -> str:
    """Return `blocks.*.up`: equal for layers that differ only in their numbers."""
    return _NUMBER.sub("*", name)


def layer_numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]


def name_of_run(run: Sequence[str], pattern: str) -> str:
    """Return `blocks.*.up` for all of a family, `blocks.0–9.up` for some, `blocks.3.up` for one."""
    if len(run) == 1:
        return run[0]
    first, last = layer_numbers(run[0]), layer_numbers(run[-1])
    if pattern or sum(one != other for one, other in zip(first, last, strict=True)) > 1:
        return pattern or f"{run[0]} to {run[-1]}"
    ends = iter(str(one) if one == other else f"{one}–{other}" for one, other in zip(first, last, strict=True))
    return _NUMBER.sub(lambda _: next(ends), run[0])


Cost = Mapping[str, float]  # of one module: parts -> bytes or milliseconds
Costs = Mapping[str, Cost]  # of one method: module -> its cost

ALIKE = 1.1  # times the cheapest: still the same, but for what a step happens to do first
LEAST_SHARE = 0.9  # of every method's whole, at least


@dataclass(frozen=True)
class ModuleLine:
    """Line of a chart; `modules`: for each method the modules of the line, none if its results do not list them."""

    name: str
    modules: list[dict[str, Cost]]

    def cost(self, place: int) -> float:
        """Return what its modules cost one method."""
        return sum(map(total, self.modules[place].values()))


def total(cost: Cost) -> float:
    return sum(cost.values())


def choose_lines(methods: Sequence[Costs], most: int) -> list[ModuleLine]:
    """Choose a limited number of lines, all from one level of modules.

    It is the deepest level at which the lines cover `LEAST_SHARE` of every method's cost, or else the level at which
    they cover most. A module's cost is its own and that of submodules below the level.
    """
    named = [{name: cost for name, cost in costs.items() if not is_sum_of_others(name)} for costs in methods]
    wholes = [sum(map(total, costs.values())) for costs in methods]
    best: list[ModuleLine] = []
    held = -1.0
    for depth in range(max((name.count(".") + 1 for costs in named for name in costs), default=0), 0, -1):
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
    """Return the heaviest in any method first; equal ones stay in the order of the results."""
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


MOST_LINES = 15
OTHER_LINES = "(all others)"
PARTS = 6  # of a module's bytes or time: named when the pointer is on its bar

BARS_SHARED = (
    "Modules that cost alike share a bar (* stands for their numbers), and submodules without a bar are in their "
    "parent's: nothing is drawn twice."
)


def _held(rows: Sequence[Row]) -> dict[Row, Costs]:
    return {
        row: {
            module: {component_named(key).label: count for key, count in held.items()}
            for module, held in composition.modules
        }
        for row in rows
        if (composition := composition_of(row))
    }


def _spent(rows: Sequence[Row]) -> dict[Row, Costs]:
    """Return GPU time by phase if every trace has it, else the host's."""
    steps = [step for step in traced_steps(rows) if step.trace.get("modules")]
    gpu = on_gpu(steps)
    return {
        step.row: {
            module["module"]: (module.get("phases") if gpu == (step.gpu is not None) else None)
            or {"in all phases": module["gpu_ms"] if gpu else module["cpu_ms"]}
            for module in step.trace["modules"]
        }
        for step in steps
    }


def _view(rows: Sequence[Row], measure: Callable[[Sequence[Row]], dict[Row, Costs]], unit: str) -> View | None:
    measured = [(row.method, costs) for row, costs in measure(rows).items() if costs]
    drawn = choose_lines([costs for _, costs in measured], MOST_LINES)
    if not drawn:
        return None
    lines: list[dict[str, Any]] = [{"name": line.name, "bars": list(map(_bar, line.modules))} for line in drawn]
    rests = [_rest(drawn, place, costs) for place, (_, costs) in enumerate(measured)]
    says = _in_words([method for method, _ in measured], lines, rests, unit)
    if any(rests):
        lines.append({"name": OTHER_LINES, "bars": [{"value": rest, "count": 1, "parts": []} for rest in rests]})
    heaviest = max(bar["value"] for line in lines for bar in line["bars"] if bar)
    return View(
        says=says,
        data={
            "unit": unit,
            "axis": unit_for(heaviest) if unit == "bytes" else {"size": 1, "name": unit},
            "methods": [{"name": method, "colour": looks_of(rows)[method]["colour"]} for method, _ in measured],
            "lines": lines,
        },
        table=Table(
            columns=("method", "module", unit),
            rows=[(method, name, total(cost)) for method, costs in measured for name, cost in costs.items()],
        ),
    )


def _rest(drawn: Sequence[ModuleLine], place: int, costs: Costs) -> float:
    """Return the cost of a method's modules that have no line of their own; 0 if it is only a rounding error."""
    whole = sum(map(total, costs.values()))
    rest = whole - sum(total(cost) for line in drawn for cost in line.modules[place].values())
    return rest if rest > 1e-9 * whole else 0.0


def _bar(modules: Costs) -> dict[str, Any] | None:
    """Return one module, or all that are alike together; None if the results do not list it."""
    if not modules:
        return None
    parts = Counter[str]()
    for cost in modules.values():
        parts.update(cost)
    heaviest = [part for part in parts.most_common(PARTS) if part[1]]
    return {"value": sum(map(total, modules.values())), "count": len(modules), "parts": heaviest}


def _in_words(methods: Sequence[str], lines: Sequence[dict[str, Any]], rests: Sequence[float], unit: str) -> str:
    """Return the heaviest named line of each method, and how much is not drawn by name."""
    show, verb = (format_bytes, "hold") if unit == "bytes" else (format_ms, "take")
    told = []
    for place, method in enumerate(methods):
        bars = [(line["name"], bar) for line in lines if (bar := line["bars"][place]) and not is_summary(line["name"])]
        if bars:
            name, bar = max(bars, key=lambda each: each[1]["value"])
            count = f", {bar['count']} of them" if bar["count"] > 1 else ""
            told.append(f"{show(bar['value'])} in {method} ({in_prose(name)}{count})")
    heaviest = f"The heaviest modules {verb} {', '.join(told)}." if told else "No module is listed by name."
    others = ", ".join(f"{show(rest)} in {method}" for method, rest in zip(methods, rests, strict=True) if rest)
    return heaviest + (f" All other modules together: {others}." if others else "")


layers_memory = chart_by_size(
    key="layers-memory",
    title="Layer by layer: memory at the peak",
    nav_label="Layers",
    kind="layers",
    how=(
        "Bytes of a module's parameters, their gradients and optimizer states, and of what its own operators hold, at "
        f"the moment of the peak. {BARS_SHARED} It does not see modules too light to be listed in the results: a bar "
        f"that is missing is not known to be zero, and {OTHER_LINES} holds them."
    ),
)(partial(_view, measure=_held, unit="bytes"))

layers_time = chart_by_size(
    key="layers-time",
    title="Layer by layer: time",
    nav_label="Layers: time",
    kind="layers",
    how=(
        f"Time of the operators that worked for a module, forward and backward, in a traced step. {BARS_SHARED} It "
        "does not see what a step takes without the profiler, which makes it longer."
    ),
)(partial(_view, measure=_spent, unit="ms"))
