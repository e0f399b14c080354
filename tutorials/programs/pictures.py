"""The pictures of the tutorials, from what was measured here and what was recorded on an H200."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

import recorded
from matplotlib.figure import Figure
from practice import Program, describe

from dpscope.reports.figures.style import new_figure, styled
from dpscope.reports.palette import METHOD_COLOURS, METHOD_MARKERS
from dpscope.vocabulary.schedules import Schedule

HERE, H200 = "#88CCEE", "#332288"


def tell(program: Program, live: Sequence[dict[str, Any]]) -> None:
    """Print what was measured here, and what was recorded on the H200 for every way of a program."""
    print(f"Finding: {program.finding}\n")
    print("measured here:")
    for measured in live:
        print(" ", describe(measured))
    print("recorded on an H200:")
    for way in program.ways:
        kept = recorded.program(program.name, way)
        print(" ", describe(kept) if kept else f"{program.name} {way}: {recorded.NOT_RECORDED}")


@styled
def draw_ways(program: Program, live: Sequence[dict[str, Any]]) -> Figure:
    """How long each way takes, as a share of the first: here, and on the H200."""
    kept = [found for way in program.ways if (found := recorded.program(program.name, way))]
    sources = [(name, found) for name, found in (("here", live), ("H200, recorded", kept)) if found]
    figure = new_figure(0.8 + 0.32 * len(program.ways) * len(sources))
    for place, (name, found) in enumerate(sources, start=1):
        ax = figure.add_subplot(1, len(sources), place)
        took = {measured["way"]: measured["median_ms"] for measured in found}
        shares = [100 * took.get(way, 0) / took[program.problem] for way in program.ways]
        bars = ax.barh(list(program.ways), shares, color=HERE if name == "here" else H200)
        labels = [f"{took[way]:.3g} ms" if way in took else "needs a GPU" for way in program.ways]
        ax.bar_label(bars, labels, padding=3)
        ax.set(title=name, xlabel=f"time, % of {program.problem}", xlim=(0, 1.3 * max(shares)))
        ax.invert_yaxis()
    return figure


@styled
def draw_time_by_size(here: dict[str, Any]) -> Figure:
    """Time of x + 1 against the bytes it moves: a floor of launching, then a slope of bandwidth."""
    figure = new_figure(2.8)
    ax = figure.subplots()
    for found, colour, marker in ((here, HERE, "o"), (recorded.first_look(), H200, "s")):
        if found:
            points = found["time_by_size"]
            label = found["hardware"] + (" (recorded)" if found is not here else " (here)")
            ax.plot(
                [p["bytes"] for p in points], [1e3 * p["median_ms"] for p in points], marker, color=colour, label=label
            )
    ax.set(xscale="log", yscale="log", xlabel="bytes read and written", ylabel="microseconds", title="torch.add(x, 1)")
    ax.legend(frameon=False)
    return figure


@styled
def draw_copies() -> Figure | None:
    """Bytes a second by route, on the H200."""
    found = recorded.first_look()
    if not found:
        return None
    figure = new_figure(1.9)
    ax = figure.subplots()
    routes = found["copies"]
    bars = ax.barh(list(routes), [rate / 1e9 for rate in routes.values()], color=H200)
    ax.bar_label(bars, [f"{rate / 1e9:.1f}" for rate in routes.values()], padding=3)
    ax.set(xscale="log", xlabel="GB/s (H200, recorded; log scale)", xlim=(1, 1e4))
    ax.invert_yaxis()
    return figure


@styled
def draw_schedules(schedules: dict[str, Schedule]) -> Figure:
    """Which steps a schedule skips, waits, warms up and records."""
    looks = {"skip": "#EEEEEE", "wait": "#BBBBBB", "warm up": "#DDCC77", "record": "#332288"}
    figure = new_figure(0.9 + 0.34 * len(schedules))
    ax = figure.subplots()
    for lane, schedule in enumerate(schedules.values()):
        cycle = [("wait", schedule.wait), ("warm up", schedule.warmup), ("record", schedule.active)]
        start = 0
        for stretch, steps in [("skip", schedule.skip_first), *(cycle * schedule.repeat)]:
            ax.barh(lane, steps, left=start, color=looks[stretch], edgecolor="white", linewidth=0.5, height=0.7)
            start += steps
    ax.set(yticks=range(len(schedules)), yticklabels=list(schedules), xlabel="training step")
    ax.invert_yaxis()
    handles = [ax.barh(0, 0, color=colour, label=name) for name, colour in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


@styled
def draw_kernels_on_roofline(points: dict[str, dict[str, float]], ceilings: dict[str, Any]) -> Figure:
    """Kernels under the roofs of the machine. points: name -> flops, bytes, seconds."""
    bandwidth = ceilings["dram_bytes_per_second"]
    roofs = {"tensor cores, bf16": ceilings["tensor_flops_per_second"], "float32": ceilings["fp32_flops_per_second"]}
    figure = new_figure(3.0)
    ax = figure.subplots()
    intensities = [2 ** (n / 8) for n in range(-48, 97)]
    for (name, roof), style in zip(roofs.items(), ("-", "--"), strict=True):
        heights = [min(bandwidth * i, roof) / 1e12 for i in intensities]
        ax.plot(intensities, heights, style, color="#777777", linewidth=1)
        ax.annotate(name, (intensities[-1], roof / 1e12), ha="right", va="bottom", fontsize=7)
    for number, (name, point) in enumerate(points.items()):
        intensity, rate = point["flops"] / point["bytes"], point["flops"] / point["seconds"] / 1e12
        look = {"color": METHOD_COLOURS[number + 1], "marker": METHOD_MARKERS[number]}
        ax.plot(intensity, rate, linestyle="none", label=name, **look)
    ax.set(xscale="log", yscale="log", xlabel="FLOP for each byte of DRAM", ylabel="TFLOP/s")
    ax.legend(frameon=False, loc="lower right")
    return figure


def show(figure: Figure | None, what: str) -> None:
    """Show a picture in a notebook; a plain script only says what it would be."""
    if figure is None:
        print(f"{what}: {recorded.NOT_RECORDED}")
        return
    try:
        from IPython import get_ipython
    except ImportError:
        get_ipython = lambda: None  # noqa: E731
    if get_ipython() is None:
        print(f"(a picture: {what})")
        return
    from IPython.display import Image, display

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=100, metadata={"Software": "dpscope"})
    display(Image(data=drawn.getvalue(), alt=what))


def tell_section(section: str, *reports: str, metrics: Sequence[str] = (), advice: bool = True) -> None:
    """Print a section of ncu's Details page for several reports side by side, and what ncu's rules say of each."""
    found = {name: kept for name in reports if (kept := recorded.details(name))}
    if not found:
        print(f"{section}: {recorded.NOT_RECORDED}")
        return
    tables = {name: kept.section(section) for name, kept in found.items()}
    listed = metrics or list(dict.fromkeys(m for table in tables.values() for m in table.get("metric", [])))
    lines = [[section, *found]]
    for metric in listed:
        rows = [table[table["metric"] == metric] for table in tables.values()]
        # Each in the unit that ncu chose.
        cells = [f"{row.iloc[0]['value']} {row.iloc[0]['unit']}".strip() if len(row) else "—" for row in rows]
        lines.append([metric, *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *cells in lines:
        print(f"{first:{widths[0]}}" + "".join(f"{cell:>{w + 2}}" for cell, w in zip(cells, widths[1:], strict=True)))
    for name, kept in found.items():
        for sentence in kept.advice_on(section)[: int(advice)]:
            said = textwrap.shorten(f"ncu says of {name}: {sentence}", 330, placeholder=" …")
            print("\n" + textwrap.fill(said, 90))
