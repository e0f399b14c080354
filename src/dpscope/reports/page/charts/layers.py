"""What single modules cost: bytes they hold at the peak, and milliseconds where a trace has ranges around modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpscope.reports.composition import composition_of, label_of
from dpscope.reports.page.chart import Chart, Table, View
from dpscope.reports.page.charts.components import unit_for
from dpscope.reports.page.charts.folding import Cost, Line, fold, total
from dpscope.reports.page.looks import looks_of
from dpscope.reports.tables import Row, group_by_size
from dpscope.reports.trace import CPU, GPU, trace_of
from dpscope.reports.words import shorten, size_in_words
from dpscope.units import format_bytes, format_ms

LINES = 15
LONGEST_NAME = 34  # characters
PARTS = 6  # of a module's bytes or time: named when the pointer is on its bar

Costs = Mapping[str, Cost]
ALIKE = "A * stands for the numbers of modules that cost alike, and its bar is what one of them costs."


def layers_memory(rows: Sequence[Row]) -> Chart | None:
    views = [view for group in group_by_size(rows) if (view := _view(group, _held, "bytes"))]
    if not views:
        return None
    return Chart(
        key="layers-memory",
        title="Layer by layer: memory at the peak",
        short="Layers",
        kind="layers",
        how=(
            "Bytes of a module's parameters, their gradients and optimizer states, and of what its own operators hold, "
            f"at the moment of the peak. {ALIKE} It does not see modules too light to be listed in the results: a bar "
            "that is missing is not known to be zero."
        ),
        views=views,
    )


def layers_time(rows: Sequence[Row]) -> Chart | None:
    views = [view for group in group_by_size(rows) if (view := _view(group, _spent, "ms"))]
    if not views:
        return None
    return Chart(
        key="layers-time",
        title="Layer by layer: time",
        short="Layers: time",
        kind="layers",
        how=(
            "Time of the operators that worked for a module, forward and backward, in a traced step; its "
            f"submodules' is theirs. {ALIKE} "
            "It does not see what a step takes without the profiler, which makes it longer."
        ),
        views=views,
    )


def _held(rows: Sequence[Row]) -> list[Costs]:
    compositions = [composition_of(row) for row in rows]
    return [
        {module: {label_of(key): count for key, count in held.items()} for module, held in each.modules} if each else {}
        for each in compositions
    ]


def _spent(rows: Sequence[Row]) -> list[Costs]:
    """GPU time where every trace has it, else the host's."""
    listed = [(trace.get("basis"), trace.get("modules") or []) for trace in map(trace_of, rows)]
    basis = GPU if all(basis == GPU for basis, modules in listed if modules) else CPU
    return [
        {module["module"]: _phases(module, f"{basis}_ms", known=basis == own) for module in modules}
        for own, modules in listed
    ]


def _phases(module: Mapping[str, Any], column: str, *, known: bool) -> Cost:
    """Phases are told in one of the two times only."""
    phases = module.get("phases") or {}
    return dict(phases) if known and phases else {"in all phases": module[column]}


def _view(rows: Sequence[Row], measure: Callable[[Sequence[Row]], list[Costs]], unit: str) -> View | None:
    measured = [(row, costs) for row, costs in zip(rows, measure(rows), strict=True) if costs]
    drawn = [line for line in fold([costs for _, costs in measured]) if line.drawn][:LINES]
    if not drawn:
        return None
    methods = [row.method for row, _ in measured]
    return View(
        size=size_in_words(rows[0].first.spec),
        says=_in_words(methods, drawn, [costs for _, costs in measured], unit),
        data={
            "unit": unit,
            "axis": unit_for(max(line.heaviest for line in drawn)) if unit == "bytes" else {"size": 1, "name": unit},
            "methods": [{"name": method, "colour": looks_of(rows)[method]["colour"]} for method in methods],
            "lines": [{"name": line.name, "bars": list(map(_bar, line.modules))} for line in drawn],
        },
        table=Table(
            columns=("method", "module", unit),
            rows=[
                (method, module, total(cost))
                for method, (_, costs) in zip(methods, measured, strict=True)
                for module, cost in costs.items()
            ],
        ),
    )


def _bar(modules: Mapping[str, Cost]) -> dict[str, Any] | None:
    """One module, or the mean of those that are alike; None where the results do not list it."""
    if not modules:
        return None
    count = len(modules)
    names = dict.fromkeys(name for cost in modules.values() for name in cost)
    parts = {name: sum(cost.get(name, 0) for cost in modules.values()) / count for name in names}
    heaviest = sorted(((name, value) for name, value in parts.items() if value), key=lambda part: -part[1])
    return {"value": sum(map(total, modules.values())) / count, "count": count, "parts": heaviest[:PARTS]}


def _in_words(methods: Sequence[str], drawn: Sequence[Line], costs: Sequence[Costs], unit: str) -> str:
    """The heaviest named module of each method, and how much is not in the drawing."""
    show, verb = (format_bytes, "holds") if unit == "bytes" else (format_ms, "takes")
    told, rests = [], []
    for place, method in enumerate(methods):
        mine = [(line.name, bar["value"]) for line in drawn if line.named and (bar := _bar(line.modules[place]))]
        seen = {module for line in drawn for module in line.modules[place]}
        rest = sum(total(cost) for module, cost in costs[place].items() if module not in seen)
        if mine:
            name, value = max(mine, key=lambda each: each[1])
            told.append(f"{show(value)} in {method} ({shorten(name, LONGEST_NAME)})")
        rests += [f"{show(rest)} in {method}"] if rest else []
    heaviest = f"The heaviest module {verb} {', '.join(told)}." if told else "No module is listed by name."
    return heaviest + (f" Lighter modules, not drawn, sum to {', '.join(rests)}." if rests else "")
