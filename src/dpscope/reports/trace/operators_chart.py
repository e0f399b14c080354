"""Why a method's step is longer than ordinary training's: the operators that grew, and those that shrank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpscope.reports.doubt import marked
from dpscope.reports.page.chart import Table, View, chart_by_size
from dpscope.reports.page.prose import in_prose
from dpscope.reports.palette import GREW, SHRANK
from dpscope.reports.tables import Row
from dpscope.reports.trace.data import GPU, IDLE, Change, Difference, differences, trace_of
from dpscope.reports.trace.text import operator_label

SHOWN = 12  # changes of a method that have a bar; all others share one
LISTED = 40  # changes of a method in the table; trace_operators.csv has every operator
REST = "everything else"


def _view(rows: Sequence[Row]) -> View | None:
    """None without a traced standard and another method."""
    found = differences([row for row in rows if trace_of(row)])
    if not found:
        return None
    return View(
        says=_in_words(found),
        data={"grew": GREW, "shrank": SHRANK, "panels": [_panel(each) for each in found]},
        table=Table(
            columns=("method", "basis", "operator", "phase", "kind", "standard_ms", "method_ms", "difference_ms"),
            rows=[line for each in found for line in _lines(each)],
        ),
    )


def _panel(found: Difference) -> dict[str, Any]:
    biggest, rest = found.biggest(SHOWN)
    bars = [_bar(change) for change in sorted(biggest, key=lambda change: -change.ms)]
    others = len(found.changes) - len(biggest)
    if others:
        bars.append({"label": f"{REST} ({others})", "name": REST, "phase": "", "kind": "", "ms": rest})
    return {"method": found.method, "total_ms": found.total_ms, "parts": _parts(found), "bars": bars}


def _bar(change: Change) -> dict[str, Any]:
    return {
        "label": operator_label(change.operator, 60),
        "name": change.operator,
        "phase": change.phase,
        "kind": change.kind,
        "ms": change.ms,
        "before_ms": change.before_ms,
        "after_ms": change.after_ms,
    }


def _in_words(found: Sequence[Difference]) -> str:
    doubts = dict.fromkeys(each.doubt for each in found if each.doubt)
    return " ".join([f"A traced step, against standard. {'. '.join(map(_says, found))}.", *doubts])


def _parts(found: Difference) -> list[tuple[str, float]]:
    """Where the difference is. A GPU that waits does not work: its idle time is told apart."""
    if found.basis != GPU:
        return [("on the host", found.total_ms)]
    idle = sum(change.ms for change in found.changes if change.operator == IDLE)
    return [("on the GPU", found.total_ms - idle), (IDLE, idle)]


def _says(found: Difference) -> str:
    parts = _parts(found)
    longer = f"{found.method} {marked(f'{found.total_ms:+.1f} ms', found.doubt)}"
    longer += f" {parts[0][0]}" if len(parts) == 1 else f": {', '.join(f'{ms:+.1f} ms {what}' for what, ms in parts)}"
    grown = [change for change in found.grown if change.operator != IDLE]
    if not grown or found.doubt:
        return longer
    most = max(grown, key=lambda change: change.ms)
    phase = f" in {most.phase}" if most.phase else ""
    return f"{longer}; what grows most is {in_prose(most.operator)}{phase} ({most.ms:+.1f} ms)"


def _lines(found: Difference) -> list[tuple[Any, ...]]:
    """As many as matter, and a last one so that they sum to the whole."""
    biggest, rest = found.biggest(LISTED)
    lines: list[tuple[Any, ...]] = [
        (found.method, found.basis, c.operator, c.phase, c.kind, c.before_ms, c.after_ms, c.ms)
        for c in sorted(biggest, key=lambda change: -change.ms)
    ]
    more = len(found.changes) > len(biggest)
    return lines + ([(found.method, found.basis, REST, "", "", None, None, rest)] if more else [])


operators = chart_by_size(
    _view,
    key="operators",
    title="Operators that grew",
    nav_label="Operators",
    kind="operators",
    how=(
        "Each operator's own time in a step under torch.profiler, less its time in standard's: the bars of a "
        "method sum to how much longer its traced step is. It does not see single kernels within an operator, "
        "and the profiler stretches what the host does."
    ),
)
