"""Where the time goes, as charts and as figures: phases, kernel families, operators; and a captured timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpscope.reports.drawing import BarPanel, describe, draw_bars, filled, new_figure, styled
from dpscope.reports.looks import (
    DIRECTION_COLOURS,
    FAMILY_COLOURS,
    GREW,
    INDIGO,
    PRIVATE_FAMILIES,
    SHRANK,
    in_prose,
    is_dark,
    operator_label,
    phase_colour,
)
from dpscope.reports.output import figure_output
from dpscope.reports.page.chart import Chart, Table, View, chart_by_size, chart_of
from dpscope.reports.tables import Row, marked
from dpscope.reports.trace import data
from dpscope.reports.trace.data import GPU, IDLE, StepDifference
from dpscope.units import format_ms, three_digits
from dpscope.vocabulary.methods import STANDARD
from dpscope.vocabulary.phases import FAMILY_LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame


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


def draw_phases(rows: Sequence[Row]) -> Figure | None:
    """Return the chart of phases, of rows of one size."""
    chart, steps = phases(rows), data.traced_steps(rows)
    if chart is None:
        return None
    # A bar drawn under a profiler should not be read as a step time.
    timed = [step.row for step in steps if step.row.median_ms]
    told = ", ".join(f"{row.method} {marked(f'{row.median_ms:.1f} ms', row.time_doubt)}" for row in timed)
    notes = [f"Unprofiled steps: {told}" if told else "Steps were not timed without the profiler"]
    notes += [] if data.on_gpu(steps) else [data.stretched_in_words(steps).removesuffix(".")]
    shown = chart.views[0].data
    series = {part["phase"]: part["ms"] for part in shown["parts"]}
    looks = {part["phase"]: filled(part["colour"]) for part in shown["parts"]}
    return _draw_stacks(steps, series, looks, shown["axis"], ["Where the time of a training step goes", *notes])


def draw_families(rows: Sequence[Row]) -> Figure | None:
    """Draw kernel time by family, a bar a method; None without a GPU trace."""
    steps = [step for step in data.traced_steps(rows) if step.trace.get("families")]
    found = data.family_series(steps)
    if not found:
        return None
    series = {FAMILY_LABELS.get(name, name): times for name, times in found.items()}
    looks = [filled(FAMILY_COLOURS.get(name, "#DDDDDD"), name in PRIVATE_FAMILIES) for name in found]
    axis = "milliseconds of kernels, copies and fills in a step"
    return _draw_stacks(steps, series, dict(zip(series, looks, strict=True)), axis, ["What the GPU works on"])


def _draw_stacks(
    steps: Sequence[data.TracedStep], series: data.Series, looks: dict[str, Any], axis: str, told: Sequence[str]
) -> Figure:
    """Draw stacks; `told`: the title and its notes."""
    totals = [three_digits(sum(filter(None, times))) for times in zip(*series.values(), strict=True)]
    panel = BarPanel(names=[step.method for step in steps], parts=series, ends=totals, axis=axis)
    return draw_bars([told[0], describe([step.row for step in steps]), *told[1:]], [panel], looks)


def draw_differences(rows: Sequence[Row]) -> Figure | None:
    """Return the chart of operators that grew, of rows of one size: a panel a method."""
    chart, found = operators(rows), data.differences(data.traced_steps(rows))
    if chart is None:
        return None
    shown = chart.views[0].data
    clock = "GPU time" if found[0].basis == GPU else "host time"
    panels = []
    for panel in shown["panels"]:
        bars = panel["bars"]
        more, less = ([bar["ms"] if (bar["ms"] > 0) is grew else None for bar in bars] for grew in (True, False))
        panels.append(
            BarPanel(
                names=[f"{bar['label']} ({bar['phase']})" if bar["phase"] else bar["label"] for bar in bars],
                parts={"longer": more, "shorter": less},
                ends=[f"{bar['ms']:+.2f}" for bar in bars],
                axis=f"milliseconds more than standard ({clock})",
                title=f"{panel['method']}: {panel['total_ms']:+.2f} ms in all",
                inside=False,
            )
        )
    looks = {"longer": filled(shown["grew"]), "shorter": filled(shown["shrank"])}
    title = "What a method's traced step takes beyond ordinary training, by operator"
    return draw_bars([title, describe(rows)], panels, looks)


DRAWINGS = {
    "trace_phases": ("where step time goes, by phase", draw_phases),
    "trace_families": ("what the GPU works on, by family of kernels", draw_families),
    "trace_differences": ("operators that make a step longer than standard's", draw_differences),
}
TRACE_FIGURES = tuple(figure_output(name, holds, draw, instrument="trace") for name, (holds, draw) in DRAWINGS.items())


LANE_HEIGHT = 0.8  # height; lanes are 1 apart
NAMED_SHARE = 0.06  # of the width: shorter ranges are not named
EVENT_LOOKS = {
    "call": ("#BBBBBB", "CUDA call"),
    "wait": (GREW, "waits for the GPU"),
    "kernel": (INDIGO, "kernel"),
    "copy": (DIRECTION_COLOURS["written"], "copy"),
    "memset": ("#DDCC77", "memset"),
}


@styled
def draw_capture(lanes: DataFrame, *, title: str = "", window_ms: tuple[float, float] | None = None) -> Figure:
    """Draw what `dpscope.instruments.nsys.views.lanes` made of a capture, from above: ranges, CUDA calls, streams.

    `window_ms`: start and end, counted from the first event; by default the whole capture.
    """
    left, right = window_ms or (0.0, float((lanes["start_ms"] + lanes["ms"]).max()))
    inside = lanes[(lanes["start_ms"] + lanes["ms"] >= left) & (lanes["start_ms"] <= right)]
    names = list(dict.fromkeys(lanes["lane"]))
    figure = new_figure(0.9 + 0.34 * len(names))
    ax = figure.subplots()
    labels = {kind: label for kind, (_, label) in EVENT_LOOKS.items()}
    for (lane, kind), events in inside.groupby(["lane", "kind"], sort=False):
        place = names.index(lane)
        if kind == "range":
            _draw_ranges(ax, events, place, (left, right))
            continue
        spans = list(zip(events["start_ms"], events["ms"], strict=True))
        # No outline and no rounding to pixels: a kernel of a microsecond is as faint as it is short.
        look: dict[str, Any] = {"color": EVENT_LOOKS[kind][0], "linewidth": 0, "snap": False}
        ax.broken_barh(spans, (place - LANE_HEIGHT / 2, LANE_HEIGHT), label=labels.pop(kind, None), **look)
    ax.set(yticks=range(len(names)), yticklabels=names, xlim=(left, right), xlabel="milliseconds", title=title)
    ax.set_ylim(len(names) - 0.5, -0.5)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    return figure


def _draw_ranges(ax: Axes, events: DataFrame, place: int, window: tuple[float, float]) -> None:
    """Draw bars of NVTX ranges, with their names if there is room."""
    left, right = window
    for name, start, length in zip(events["name"], events["start_ms"], events["ms"], strict=True):
        colour, lane = phase_colour(name), (place - LANE_HEIGHT / 2, LANE_HEIGHT)
        ax.broken_barh([(start, length)], lane, color=colour, edgecolor="white", linewidth=0.5)
        first, last = max(start, left), min(start + length, right)
        if last - first > NAMED_SHARE * (right - left):
            ink = "white" if is_dark(colour) else "black"
            ax.text((first + last) / 2, place, name, ha="center", va="center", fontsize=7, color=ink, clip_on=True)
