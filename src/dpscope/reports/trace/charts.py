"""Charts of step time by phase, and of the operators that make a method's step longer than standard's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpscope.reports.doubt import marked
from dpscope.reports.page.chart import Chart, Table, View, chart_by_size, chart_of
from dpscope.reports.palette import GREW, SHRANK, is_dark, phase_colour
from dpscope.reports.tables import Row
from dpscope.reports.trace import data
from dpscope.reports.words import in_prose, operator_label
from dpscope.results.trace_difference import GPU, IDLE, StepDifference
from dpscope.units import format_ms
from dpscope.vocabulary.methods import STANDARD

DRAWN_CHANGES = 12  # changes of a method that have a bar; all others share one
LISTED_CHANGES = 40  # changes of a method in the table; trace_operators.csv has every operator
REST_BAR = "everything else"

# How phases were measured: on a GPU, or on the host.
HOW_PHASES = {
    True: (
        "GPU time of each phase, from a step under torch.profiler, which leaves kernels as long as they are; "
        f"'{IDLE}' is what the step takes beyond that without the profiler. It does not see what overlaps on "
        "several streams, nor what the host does meanwhile."
    ),
    False: (
        "Time on the host by phase, of a step under torch.profiler, which makes the step longer: compare parts, and "
        "take times of steps from the chart of times. It does not see inside a phase: the operators do."
    ),
}


def phases(rows: Sequence[Row]) -> Chart | None:
    groups = [steps for steps in data.traced(rows) if data.phase_series(steps)]
    return chart_of(
        map(_phases_view, groups),
        key="phases",
        title="Where step time goes",
        nav_label="Phases",
        how=" ".join(HOW_PHASES[gpu] for gpu in dict.fromkeys(map(data.on_gpu, groups))),
    )


def _phases_view(steps: Sequence[data.TracedStep]) -> View:
    gpu, series = data.on_gpu(steps), data.phase_series(steps)
    times = [
        (step.method, {name: ms for name, values in series.items() if (ms := values[place]) is not None})
        for place, step in enumerate(steps)
    ]
    parts = [
        {"phase": name, "colour": phase_colour(name), "dark": is_dark(phase_colour(name)), "ms": values}
        for name, values in series.items()
    ]
    return View(
        size=steps[0].row.size,
        # GPU time is as long as without the profiler; time on the host is not.
        says=("" if gpu else data.stretched_in_words(steps)) or f"A step: {'. '.join(_phases_in_words(times))}.",
        data={
            "methods": [method for method, _ in times],
            "axis": f"{'GPU milliseconds of an unprofiled' if gpu else 'milliseconds of a traced'} step",
            "parts": parts,
            "unprofiled_ms": [step.row.median_ms for step in steps],
        },
        table=Table(
            columns=("method", "phase", "gpu_ms" if gpu else "host_ms"),
            rows=[(method, name, ms) for method, own in times for name, ms in own.items()],
        ),
    )


def _phases_in_words(times: Sequence[tuple[str, dict[str, float]]]) -> list[str]:
    """Return what each method adds to ordinary training and where most of it is; else its longest phase."""
    standard, told = dict(times).get(STANDARD), []
    for method, own in times:
        total = sum(own.values())
        if standard is None or method == STANDARD:
            longest = max(own, key=lambda name: own[name])
            told.append(f"{method} {format_ms(total)}, most of it in {longest} ({format_ms(own[longest])})")
        else:
            extra = {name: own.get(name, 0.0) - standard.get(name, 0.0) for name in {**own, **standard}}
            most = max(extra, key=lambda name: extra[name])
            more = total - sum(standard.values())
            change = f"{format_ms(abs(more))} {'more' if more > 0 else 'less'} than {STANDARD}"
            told.append(f"{method} {change}; what grows most is {most} ({extra[most]:+.1f} ms)")
    return told


@chart_by_size(
    key="operators",
    title="Operators that grew",
    nav_label="Operators",
    how=(
        "Each operator's own time in a step under torch.profiler, less its time in standard's: the bars of a "
        "method sum to how much longer its traced step is. It does not see single kernels within an operator, and "
        "the profiler stretches what the host does."
    ),
)
def operators(rows: Sequence[Row]) -> View | None:
    """Return the operators that differ from standard."""
    found = data.differences(data.traced_steps(rows))
    if not found:
        return None
    doubts = dict.fromkeys(each.doubt for each in found if each.doubt)
    return View(
        says=" ".join([f"A traced step, against standard. {'. '.join(map(_operators_in_words, found))}.", *doubts]),
        data={"grew": GREW, "shrank": SHRANK, "panels": [_panel(each) for each in found]},
        table=Table(
            columns=("method", "basis", "operator", "phase", "kind", "standard_ms", "method_ms", "difference_ms"),
            rows=[line for each in found for line in _lines(each)],
        ),
    )


def _panel(found: StepDifference) -> dict[str, Any]:
    biggest, rest, others = found.biggest(DRAWN_CHANGES)
    bars: list[dict[str, Any]] = [
        {
            "label": operator_label(change.operator, 60),
            **{"name": change.operator, "phase": change.phase, "kind": change.kind},
            **{"ms": change.ms, "before_ms": change.before_ms, "after_ms": change.after_ms},
        }
        for change in biggest
    ]
    if others:
        bars.append({"label": f"{REST_BAR} ({others})", "name": REST_BAR, "phase": "", "kind": "", "ms": rest})
    return {"method": found.method, "total_ms": found.total_ms, "parts": _parts(found), "bars": bars}


def _parts(found: StepDifference) -> list[tuple[str, float]]:
    """Return where the difference is; idle time of the GPU is kept apart from work."""
    if found.basis != GPU:
        return [("on the host", found.total_ms)]
    idle = sum(change.ms for change in found.changes if change.operator == IDLE)
    return [("on the GPU", found.total_ms - idle), (IDLE, idle)]


def _operators_in_words(found: StepDifference) -> str:
    parts = _parts(found)
    longer = f"{found.method} {marked(f'{found.total_ms:+.1f} ms', found.doubt)}"
    longer += f" {parts[0][0]}" if len(parts) == 1 else f": {', '.join(f'{ms:+.1f} ms {what}' for what, ms in parts)}"
    grown = [change for change in found.changes if change.ms > 0 and change.operator != IDLE]
    if not grown or found.doubt:
        return longer
    most = max(grown, key=lambda change: change.ms)
    phase = f" in {most.phase}" if most.phase else ""
    return f"{longer}; what grows most is {in_prose(most.operator)}{phase} ({most.ms:+.1f} ms)"


def _lines(found: StepDifference) -> list[tuple[Any, ...]]:
    """Return the lines that matter, and a last one for the rest so that they sum to the whole."""
    biggest, rest, others = found.biggest(LISTED_CHANGES)
    lines: list[tuple[Any, ...]] = [(c.operator, c.phase, c.kind, c.before_ms, c.after_ms, c.ms) for c in biggest]
    lines += [(REST_BAR, "", "", None, None, rest)] if others else []
    return [(found.method, found.basis, *line) for line in lines]
