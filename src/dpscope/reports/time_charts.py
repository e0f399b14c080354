"""Step time against batch, sequence and memory: charts of the page, and the figure `performance_tradeoff`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dpscope.reports import drawing
from dpscope.reports.drawing import Point
from dpscope.reports.export import IDENTITY
from dpscope.reports.looks import looks_of, shorten
from dpscope.reports.output import figure_output
from dpscope.reports.page.chart import Chart, Table, View, chart_by_size, chart_of
from dpscope.reports.tables import EXPLAINED, SIZES, SPEEDS, Row, explain, grouped, marked
from dpscope.units import format_bytes, format_ms, format_ratio, format_throughput, list_names
from dpscope.vocabulary.methods import STANDARD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NAMED_ROWS = 3  # in a sentence
METHOD = attrgetter("method")
NOT_SEEN = {
    True: "the noise and the privacy that are bought: those are the same for every private method",
    False: "how much of either is due to privacy, since there is no standard to divide by",
}


@chart_by_size(
    key="step-time",
    title="Step time",
    nav_label="Time",
    how=(
        "A bar is the median of the timed steps after warm-up; below it each point is one step, and the line "
        "spans their 10th to 90th percentile, in a process without any profiler. It does not see data loading: "
        "every step trains on the same batch."
    ),
)
def step_time(rows: Sequence[Row]) -> View | None:
    """Return the bars and points of step times."""
    timed = [row for row in rows if row.median_ms is not None]
    if not timed:
        return None
    bars, costs, lines = [], [], []
    for row in timed:
        doubts = (row.time_doubt, row.ratio_doubt)
        bars.append(
            {
                **{"method": row.method, "colour": looks_of(rows)[row.method]["colour"], "median_ms": row.median_ms},
                **{"spread_ms": row.spread_ms, "ratio": row.time_ratio},
                "marks": [marked("", doubt) for doubt in doubts],  # of the time, of the ratio
                "per_second": [f"{format_throughput(speed)} {name}" for name, speed in row.speeds.items()],
                "steps_ms": row.timing.get("step_ms") or [],
            }
        )
        ratio = "" if row.time_ratio is None or row.method == STANDARD else f" ({row.time_ratio_shown})"
        costs.append(f"{row.time_shown}{ratio} with {row.method}")
        figures = (row.median_ms, *(row.spread_ms or (None, None)), *map(row.speeds.get, SPEEDS), row.time_ratio)
        lines.append((row.method, *figures, row.ratio_doubt or None))
    columns = ("method", "median_ms", "p10_ms", "p90_ms", *SPEEDS, "ratio_to_standard", "doubt")
    return View(
        says=" ".join(filter(None, (f"A step takes {', '.join(costs)}.", explain(row.ratio_doubt for row in timed)))),
        data={"bars": bars},
        table=Table(columns=columns, rows=lines),
    )


def _range(values: Iterable[float | None], read: Callable[[float], str]) -> str:
    """Return the range of the known values: `1.02×`, or `1.02× to 1.31×`."""
    found = [value for value in values if value]
    return " to ".join(dict.fromkeys((read(found[0]), read(found[-1])))) if found else ""


def _doubt_of(rows: Sequence[Row]) -> str:
    """Return a mark if the time of any is doubtful."""
    return marked("", "".join(row.ratio_doubt for row in rows))


def _naming(what: str, reasons: Sequence[tuple[Row, str]]) -> str:
    """Return a sentence that names some rows and the reason; empty without rows. The table lists all of them."""
    told = list_names([f"{row.method} at {row.size} ({why})" for row, why in reasons], NAMED_ROWS)
    return f" {what}: {told}." if told else ""


def _cost_table(rows: Sequence[Row]) -> Table:
    """Time and peak of every row, of those without figures too."""
    costs = [{**_costs(row, "_to_standard"), "time_doubt": row.ratio_doubt or None} for row in rows]
    known = [{**row.fields(*IDENTITY), "status": row.result.status} for row in rows]
    return Table.of([each | cost for each, cost in zip(known, costs, strict=True)])


def _costs(row: Row, to_standard: str = "") -> dict[str, float | None]:
    ratios = {f"time_ratio{to_standard}": row.time_ratio, f"memory_ratio{to_standard}": row.memory_ratio}
    return {"median_ms": row.median_ms, "peak_bytes": row.peak_bytes, **ratios}


@dataclass(frozen=True)
class Way:
    """Horizontal axis of a chart: what varies, and what a panel holds fixed."""

    varies: str
    word: str
    axis: str
    fixed: str
    fixed_word: str

    def at(self, row: Row) -> int:
        return int(row.spec[self.varies])

    def fixed_at(self, row: Row, before: str = "") -> str:
        """Return `sequence 1024`, or nothing if there is none."""
        return f"{before}{self.fixed_word} {fixed}" if (fixed := row.spec.get(self.fixed)) else ""


BATCH = Way("batch_size", "batch", "batch size", "seq_len", "sequence")
SEQUENCE = Way("seq_len", "sequence", "sequence length", "batch_size", "batch")

Panel = list[Row]


def _scaling(rows: Sequence[Row], way: Way) -> Chart | None:
    """Return the chart of scaling; None unless a method was measured at two values with all else equal."""
    groups = grouped((row for row in rows if row.spec.get(way.varies)), lambda row: row.spec.get(way.fixed))
    panels = [
        sorted(group, key=way.at)
        for group in groups.values()
        if len(set(map(way.at, group))) > 1 and any(row.median_ms or row.peak_bytes for row in group)
    ]
    if not panels:
        return None
    shown = [row for panel in panels for row in panel]
    # Multiples where all have one; else no row would be missing but for want of a denominator.
    relative = all(row.time_ratio is not None for row in shown if row.median_ms)
    capacity = max((row.first.environment.get("gpu_memory_bytes") or 0 for row in shown), default=0)
    failed = [(row, row.result.status) for row in shown if not row.result.ok]
    view = View(
        says=_scaling_in_words(panels, way, relative=relative) + _naming("Could not be measured", failed),
        data={
            "axis": way.axis,
            "relative": relative,
            "capacity_bytes": capacity or None,
            "panels": [_panel(panel, way, rows) for panel in panels],
        },
        table=_cost_table(shown),
    )
    return chart_of(
        [view],
        key=f"scaling-{way.word}",
        title=f"How the cost grows with {way.axis}",
        nav_label=way.axis.partition(" ")[0].capitalize(),
        kind="scaling",
        how=(
            f"Median step time{', as a multiple of the time of standard at the same size' if relative else ''}, "
            "and peak of allocated bytes, each size in a process of its own; a cross at the top is a size that could "
            "not be measured. It does not see sizes between the points."
        ),
    )


scaling_over_batch = partial(_scaling, way=BATCH)
scaling_over_sequence = partial(_scaling, way=SEQUENCE)


def _panel(panel: Panel, way: Way, rows: Sequence[Row]) -> dict[str, Any]:
    looks, points = looks_of(rows), defaultdict[str, list[dict[str, Any]]](list)
    for row in panel:
        about = {"mark": marked("", row.ratio_doubt), "status": row.result.status}
        points[row.method].append({"x": way.at(row), **_costs(row), **about})
    lines = [{"method": method, **looks[method], "points": points[method]} for method in looks if method in points]
    return {"title": way.fixed_at(panel[0]), "lines": lines}


def _scaling_in_words(panels: Sequence[Panel], way: Way, *, relative: bool) -> str:
    """Describe the scaling of the panel with the most sizes, from smallest to largest."""
    panel = max(panels, key=len)
    told = []
    for method, own in grouped(panel, METHOD).items():
        times = [row.time_ratio if relative else row.median_ms for row in own if method != STANDARD or not relative]
        taken = _range(times, format_ratio if relative else format_ms)
        held = _range([row.peak_bytes for row in own], format_bytes)
        if parts := ", ".join(filter(None, (taken, held))):
            told.append(f"{method}{_doubt_of(own)} {parts}")
    what = f"time{' against standard' if relative else ''} and peak memory"
    sizes = f"{way.word} {way.at(panel[0])} to {way.at(panel[-1])}{way.fixed_at(panel[0], ' at ')}"
    return f"From {sizes}, {what}: {'; '.join(told)}."


def tradeoff(rows: Sequence[Row]) -> Chart | None:
    """Return every method at every size relative to standard; None unless two rows have a time and a peak."""
    whole = [row for row in rows if row.median_ms and row.peak_bytes]
    compared = [row for row in whole if row.time_ratio is not None and row.memory_ratio is not None]
    relative = any(row.method != STANDARD for row in compared)
    drawn = compared if relative else whole
    if len(drawn) < 2:
        return None
    looks, left_out = looks_of(rows), []
    for row in rows:
        if row not in drawn:
            why = "no time" if not row.median_ms else "no peak" if not row.peak_bytes else "no standard at this size"
            left_out.append((row, why if row.result.ok else row.result.status))
    others = grouped((row for row in drawn if not (relative and row.method == STANDARD)), METHOD)
    lines = [
        {
            **{"method": method, **looks[method]},
            "points": [
                {
                    "size": row.size,
                    "short": "×".join(str(row.spec[name]) for name in SIZES if row.spec.get(name)),
                    "spread_ms": row.spread_ms,
                    **_costs(row),
                    "doubt": EXPLAINED.get(row.ratio_doubt, ""),
                }
                for row in sorted(own, key=lambda row: (row.work, row.spec.get("seq_len") or 1))
            ],
        }
        for method, own in others.items()
    ]
    standard = {"method": STANDARD, **looks[STANDARD]} if relative else None
    view = View(
        says=_tradeoff_in_words(drawn, relative=relative) + _naming("Not drawn", left_out),
        data={"relative": relative, "standard": standard, "lines": lines},
        table=_cost_table(rows),
    )
    return chart_of(
        [view],
        key="tradeoff",
        title="Memory against time",
        nav_label="Trade-off",
        how=(
            "Median time of the timed steps and peak of allocated bytes"
            f"{', as multiples of those of standard at the same size' if relative else ''}; a line joins the sizes of "
            f"one method. It does not see {NOT_SEEN[relative]}."
        ),
    )


def _tradeoff_in_words(drawn: Sequence[Row], *, relative: bool) -> str:
    told = []
    for method, own in grouped(drawn, METHOD).items():
        figures = [(row.time_ratio, row.memory_ratio) if relative else (row.median_ms, row.peak_bytes) for row in own]
        times, peaks = (sorted(filter(None, each)) for each in zip(*figures, strict=True))
        if relative and method != STANDARD:
            took = f"{_range(times, format_ratio)} the time{_doubt_of(own)}"
            told.append(f"{method} {took} and {_range(peaks, format_ratio)} the memory")
        elif not relative:
            told.append(f"{method} {_range(times, format_ms)} and {_range(peaks, format_bytes)}")
    sizes = len({row.size for row in drawn})
    where = f"Over {sizes} sizes" if sizes > 1 else "A step"
    return f"{where}{', against standard' if relative else ''}: {'; '.join(told)}."


LONGEST_LABEL = 28  # characters
CLOSEST = 0.3  # of the largest value: the least that an axis spans


@drawing.styled
def draw_tradeoff(rows: Sequence[Row]) -> Figure | None:
    """Return the rows of one size; None if none of them has both a time and a peak."""
    drawn = [row for row in rows if row.median_ms and row.peak_bytes]
    if not drawn:
        return None
    figure, axes = drawing.new_panels(2, 2, 0.09 * len(drawn), [3.1])
    missing = {row: "peak" if row.median_ms else "time" for row in rows if row not in drawn}
    notes = drawing.not_drawn([(row, row.why_none(f"no {what} was measured")) for row, what in missing.items()])
    notes.append(explain(row.ratio_doubt for row in drawn).removesuffix("."))
    drawing.set_title(figure, "Peak memory against time of a training step", drawing.describe(rows), *notes)
    unit, name = drawing.byte_unit(max(row.peak_bytes or 0.0 for row in drawn))
    second, clock = (1e3, "s") if max(row.median_ms or 0.0 for row in drawn) >= 10_000 else (1.0, "ms")
    points, ratios = _points(drawn, second, unit)
    _scatter(axes[0], points, f"step time ({clock}), median and p10–p90", f"peak memory ({name})")
    for line in (axes[1].axvline, axes[1].axhline) if ratios else ():
        line(1.0, color="0.6", linewidth=0.6, linestyle=(0, (4, 2)), zorder=0)
    _scatter(axes[1], ratios, "time (× standard)", "peak memory (× standard)")
    drawing.name_points(figure, points, columns=2)
    drawing.settle(figure)
    return figure


def _points(rows: Sequence[Row], second: float, unit: float) -> tuple[list[Point], list[Point]]:
    """Return points, absolute and as multiples of standard if it has both figures, which its name then tells."""
    points, ratios = [], []
    for row in rows:
        name = shorten(row.method, LONGEST_LABEL)
        label, look = marked(name, row.time_doubt), dict[str, Any](looks_of([row])[row.method])
        time, peak = row.median_ms or 0.0, row.peak_bytes or 0.0
        low, high = row.spread_ms or (time, time)
        if row.time_ratio is not None and row.memory_ratio is not None:
            label = f"{name} {row.time_ratio_shown}, {format_ratio(row.memory_ratio)}"
            ratios.append(Point(x=row.time_ratio, y=row.memory_ratio, label=label, **look))
        spread = low / second, high / second
        points.append(Point(x=time / second, y=peak / unit, label=label, spread=spread, **look))
    return points, ratios


def _scatter(ax: Axes, points: Sequence[Point], x: str, y: str) -> None:
    if not points:
        ax.text(0.5, 0.5, "no standard at this size:\nno ratios", transform=ax.transAxes, ha="center")
        ax.set_axis_off()
        return
    drawing.draw_points(ax, points)
    across = [edge for point in points for edge in (point.x, *(point.spread or ()))]
    ax.set(xlabel=x, ylabel=y, xlim=_limits(across), ylim=_limits([point.y for point in points]))


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return limits with room around the values, and never so close that noise looks like a difference."""
    low, high = min(values), max(values)
    middle, span = (low + high) / 2, max(high - low, CLOSEST * high)
    return max(middle - 0.7 * span, 0.0), middle + 0.7 * span


TRADEOFF_FIGURE = figure_output("performance_tradeoff", "time against memory of each method", draw_tradeoff)
