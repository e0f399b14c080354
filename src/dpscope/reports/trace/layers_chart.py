"""What single modules cost: bytes they hold at the peak, and milliseconds where a trace has ranges around modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dpscope.reports.memory.chart_series import unit_for
from dpscope.reports.memory.data import composition_of, label_of
from dpscope.reports.page.chart import Table, View, chart_by_size
from dpscope.reports.page.looks import looks_of
from dpscope.reports.page.prose import in_prose
from dpscope.reports.tables import Row
from dpscope.reports.trace.data import CPU, GPU, trace_of
from dpscope.reports.trace.folding import Cost, Costs, Line, choose_lines, total
from dpscope.units import format_bytes, format_ms

LINES = 15
REST = "(all others)"
PARTS = 6  # of a module's bytes or time: named when the pointer is on its bar

ALIKE = (
    "Modules that cost alike share a bar (* stands for their numbers), and submodules without a bar are in their "
    "parent's: nothing is drawn twice."
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
    every = [costs for _, costs in measured]
    drawn = choose_lines(every, LINES) if measured else []
    if not drawn:
        return None
    methods = [row.method for row, _ in measured]
    rests = [_rest(drawn, place, costs) for place, costs in enumerate(every)]
    lines: list[dict[str, Any]] = [{"name": line.name, "bars": list(map(_bar, line.modules))} for line in drawn]
    if any(rests):
        lines.append({"name": REST, "bars": [_bar({REST: {}}, rest) for rest in rests]})
    heaviest = max(bar["value"] for line in lines for bar in line["bars"] if bar)
    return View(
        says=_in_words(methods, drawn, rests, unit),
        data={
            "unit": unit,
            "axis": unit_for(heaviest) if unit == "bytes" else {"size": 1, "name": unit},
            "methods": [{"name": method, "colour": looks_of(rows)[method]["colour"]} for method in methods],
            "lines": lines,
        },
        table=Table(
            columns=("method", "module", unit),
            rows=[
                (method, module, total(cost))
                for method, costs in zip(methods, every, strict=True)
                for module, cost in costs.items()
            ],
        ),
    )


def _rest(drawn: Sequence[Line], place: int, costs: Costs) -> float:
    """What a method's modules without a line cost; what is lost in rounding is nothing."""
    whole = sum(map(total, costs.values()))
    rest = whole - sum(total(cost) for line in drawn for cost in line.modules[place].values())
    return rest if rest > 1e-9 * whole else 0.0


def _bar(modules: Costs, value: float | None = None) -> dict[str, Any] | None:
    """One module, or all that are alike together; None where the results do not list it."""
    if not modules:
        return None
    names = dict.fromkeys(name for cost in modules.values() for name in cost)
    parts = {name: sum(cost.get(name, 0) for cost in modules.values()) for name in names}
    heaviest = sorted(((name, held) for name, held in parts.items() if held), key=lambda part: -part[1])
    whole = sum(map(total, modules.values())) if value is None else value
    return {"value": whole, "count": len(modules), "parts": heaviest[:PARTS]}


def _in_words(methods: Sequence[str], drawn: Sequence[Line], rests: Sequence[float], unit: str) -> str:
    """The heaviest named line of each method, and how much is not drawn by name."""
    show, verb = (format_bytes, "hold") if unit == "bytes" else (format_ms, "take")
    told = []
    for place, method in enumerate(methods):
        mine = [(line, bar) for line in drawn if line.named and (bar := _bar(line.modules[place]))]
        if mine:
            line, bar = max(mine, key=lambda each: each[1]["value"])
            count = f", {bar['count']} of them" if bar["count"] > 1 else ""
            told.append(f"{show(bar['value'])} in {method} ({in_prose(line.name)}{count})")
    heaviest = f"The heaviest modules {verb} {', '.join(told)}." if told else "No module is listed by name."
    others = ", ".join(f"{show(rest)} in {method}" for method, rest in zip(methods, rests, strict=True) if rest)
    return heaviest + (f" All other modules together: {others}." if others else "")


layers_memory = chart_by_size(
    partial(_view, measure=_held, unit="bytes"),
    key="layers-memory",
    title="Layer by layer: memory at the peak",
    nav_label="Layers",
    kind="layers",
    how=(
        "Bytes of a module's parameters, their gradients and optimizer states, and of what its own operators hold, "
        f"at the moment of the peak. {ALIKE} It does not see modules too light to be listed in the results: a bar "
        f"that is missing is not known to be zero, and {REST} holds them."
    ),
)


layers_time = chart_by_size(
    partial(_view, measure=_spent, unit="ms"),
    key="layers-time",
    title="Layer by layer: time",
    nav_label="Layers: time",
    kind="layers",
    how=(
        f"Time of the operators that worked for a module, forward and backward, in a traced step. {ALIKE} "
        "It does not see what a step takes without the profiler, which makes it longer."
    ),
)
