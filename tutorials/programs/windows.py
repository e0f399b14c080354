"""Drawings of the windows of Perfetto, ncu-ui and nsys-ui, from recorded data, with numbered places to look at.

They are drawings of these views, not screenshots: the tools' own windows need a display and cannot be copied here.
"""

from __future__ import annotations

import gzip
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

import recorded
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from pictures import drawn, label

from dpscope.instruments.nsys import views
from dpscope.instruments.nsys.reading import CapturedTimeline
from dpscope.reports.drawing import new_figure

INK, PALE, BAR, ACCENT, WAIT = "#222222", "#F2F2F2", "#332288", "#117733", "#CC6677"
TRACK_COLOURS = {"GPU": BAR, "computing": BAR, "collectives": ACCENT}
ROW = 0.26  # inches a line


def _sheet(height: float, title: str) -> tuple[Figure, Axes]:
    """Return a figure with a frame like a window's, in units of 0 to 100 across and lines downwards."""
    figure = new_figure(height)
    ax = figure.subplots()
    lines = height / ROW
    ax.set(xlim=(0, 100), ylim=(lines, 0))
    ax.axis("off")
    ax.add_patch(Rectangle((0, 0), 100, 1.2, facecolor="#DDDDDD"))
    ax.text(1, 0.6, title, va="center", fontsize=8, color=INK)
    ax.add_patch(Rectangle((0, 0), 100, lines, fill=False, edgecolor="#888888", linewidth=0.8))
    return figure, ax


def _place(ax: Axes, x: float, y: float, number: int) -> None:
    look = {"boxstyle": "circle,pad=0.2", "facecolor": "#FFD92F", "edgecolor": INK, "linewidth": 0.5}
    ax.text(x, y, str(number), ha="center", va="center", fontsize=7, bbox=look, zorder=5)


def _clock(ax: Axes, x: float, end: float, mark: int) -> None:
    """Write the time at the mark'th fifth of a timeline, inside its frame."""
    side = "left" if mark == 0 else "right" if mark == 5 else "center"
    ax.text(x, 1.9, f"{end * mark / 5:.2f} ms", ha=side, va="center", fontsize=6)


def _table(ax: Axes, top: float, columns: Sequence[tuple[float, str]], rows: Sequence[Sequence[str]]) -> None:
    ax.add_patch(Rectangle((0.5, top - 0.6), 99, 1.2, facecolor="#E8E8F5"))
    for x, name in columns:
        ax.text(x, top, name, va="center", fontsize=7, weight="bold")
    for line, row in enumerate(rows, start=1):
        if line % 2 == 0:
            ax.add_patch(Rectangle((0.5, top + 1.2 * line - 0.6), 99, 1.2, facecolor=PALE))
        for (x, _), cell in zip(columns, row, strict=True):
            ax.text(x, top + 1.2 * line, cell, va="center", fontsize=7)


@drawn
def draw_ncu_summary(report: str) -> Figure | None:
    """Draw ncu-ui's Summary page: one row a launch, with duration, throughputs and estimated speed-up."""
    found, speedups = recorded.launches(report), recorded.estimated_speedups(report)
    if not found:
        return None
    figure, ax = _sheet(
        ROW * (5.2 + 1.2 * len(found)), f"NVIDIA Nsight Compute — {report}.ncu-rep    [Summary]  Details  Source  Raw"
    )
    columns = [
        (1, "ID"),
        (5, label("Estimated speedup", "Estimated Speedup")),
        (22, "Function Name"),
        (59, "Duration"),
        (69, "Compute"),
        (78, "Memory"),
        (87, "Registers"),
    ]
    rows = []
    for number, (launch, speedup) in enumerate(zip(found, speedups, strict=True)):
        duration = next(m for m in launch.metrics if m.name == "Duration")
        shown = [f"{launch.number(name):.0f} %" for name in ("Compute (SM) Throughput", "Memory Throughput")]
        name = launch.kernel.removeprefix("void ").replace("at::native::", "")[:38]
        registers = f"{launch.number('Registers Per Thread'):.0f}"
        rows.append([str(number), f"{speedup:.0f} %", name, f"{duration.value} {duration.unit}", *shown, registers])
    _table(ax, 3.2, columns, rows)
    for number, x in enumerate((12, 30, 62, 76), start=1):
        _place(ax, x, 1.85, number)
    _place(ax, 66, 0.6, 5)
    return figure


@drawn
def draw_ncu_details(report: str) -> Figure | None:
    """Draw ncu-ui's Details page: the header of a launch, and the first sections with their bars."""
    launch = recorded.details(report)
    if launch is None:
        return None
    figure, ax = _sheet(ROW * 20, f"NVIDIA Nsight Compute — {report}.ncu-rep    Summary  [Details]  Source  Raw")
    ax.text(1, 2.0, f"{launch.kernel[:56]}    {launch.grid} x {launch.block}", va="center", fontsize=7, weight="bold")
    _place(ax, 97, 2.0, 1)
    bars = (
        ("Compute (SM) Throughput", "Compute (SM) [%]"),
        ("Memory Throughput", "Memory [%]"),
        ("L1/TEX Cache Throughput", "L1/TEX [%]"),
        ("L2 Cache Throughput", "L2 [%]"),
        ("DRAM Throughput", "DRAM [%]"),
    )
    ax.add_patch(Rectangle((0.5, 2.9), 99, 1.1, facecolor="#E8E8F5"))
    ax.text(1, 3.45, "▾ GPU Speed Of Light Throughput", va="center", fontsize=7.5)
    _place(ax, 97, 3.45, 2)
    for line, (metric, name) in enumerate(bars):
        y = 4.7 + 1.1 * line
        ax.text(2, y, name, va="center", fontsize=7)
        share = launch.number(metric)
        ax.add_patch(Rectangle((25, y - 0.35), 55, 0.7, facecolor=PALE))
        ax.add_patch(Rectangle((25, y - 0.35), 0.55 * share, 0.7, facecolor=BAR))
        ax.text(81, y, f"{share:.1f}", va="center", fontsize=7)
    _place(ax, 22, 4.7, 3)
    said = (launch.advice_on("GPU Speed Of Light Throughput") or [""])[0]
    ax.add_patch(Rectangle((2, 10.0), 95, 2.2, facecolor="#FFF8DC", edgecolor="#CCBB66", linewidth=0.5))
    for line, words in enumerate(textwrap.wrap(said, 105)[:2]):
        ax.text(3, 10.6 + 0.9 * line, ("i  " if line == 0 else "    ") + words, va="center", fontsize=6.5)
    _place(ax, 97, 11.1, 4)
    titles = (
        "Compute Workload Analysis",
        "Memory Workload Analysis",
        "Scheduler Statistics",
        "Warp State Statistics",
        "Occupancy",
    )
    for line, title in enumerate(titles):
        y = 13.2 + 1.25 * line
        ax.add_patch(Rectangle((0.5, y - 0.5), 99, 1.0, facecolor="#F4F4FA"))
        ax.text(1, y, f"▸ {title}", va="center", fontsize=7.5)
    _place(ax, 97, 15.7, 5)
    return figure


@drawn
def draw_nsys_window(timeline: CapturedTimeline, title: str) -> Figure:
    """Draw nsys-ui's timeline: threads with NVTX and CUDA calls above, the GPU's streams below, one clock on top."""
    lanes = views.lanes(timeline)
    names = list(dict.fromkeys(lanes["lane"]))
    figure, ax = _sheet(ROW * (5.0 + 1.5 * len(names)), f"NVIDIA Nsight Systems — {title}    Timeline View ▾")
    end = float((lanes["start_ms"] + lanes["ms"]).max())
    scale = 74 / end
    for mark in range(6):
        x = 24 + 74 * mark / 5
        _clock(ax, x, end, mark)
        ax.plot([x, x], [2.3, 2.7 + 1.5 * len(names)], color="#DDDDDD", linewidth=0.5, zorder=0)
    looks = {"wait": WAIT, "kernel": BAR, "copy": ACCENT, "memset": "#DDCC77", "range": "#88CCEE"}
    for place, name in enumerate(names):
        y = 3.4 + 1.5 * place
        ax.text(1, y, f"▾ {name}", va="center", fontsize=7)
        for event in lanes[lanes["lane"] == name].itertuples():
            look = {"facecolor": looks.get(event.kind, "#AAAAAA"), "linewidth": 0}
            width = max(scale * event.ms, 0.05)
            ax.add_patch(Rectangle((24 + scale * event.start_ms, y - 0.5), width, 1.0, **look))
            if event.kind == "range" and width > 7:
                ax.text(
                    24 + scale * event.start_ms + width / 2, y, event.name[:16], ha="center", va="center", fontsize=6
                )
    _place(ax, 21, 1.9, 1)
    for place, name in enumerate(names):
        kinds = set(lanes[lanes["lane"] == name]["kind"])
        number = 2 if "range" in kinds else 3 if kinds & {"call", "wait"} else 4
        _place(ax, 21, 3.4 + 1.5 * place, number)
    return figure


@drawn
def draw_perfetto_window(events: Sequence[tuple[str, str, float, float]], title: str) -> Figure:
    """Draw Perfetto's tracks. events: track, name, start and length in ms; the first column's order is kept."""
    tracks = list(dict.fromkeys(track for track, *_ in events))
    figure, ax = _sheet(
        ROW * (6.5 + 1.7 * len(tracks)), f"ui.perfetto.dev — {title}        🔍 Search".replace("🔍 ", "")
    )
    end = max(start + length for _, _, start, length in events)
    scale = 72 / end
    for mark in range(6):
        _clock(ax, 26 + 72 * mark / 5, end, mark)
    for place, track in enumerate(tracks):
        y = 3.4 + 1.7 * place
        ax.add_patch(Rectangle((0.5, y - 0.75), 99, 1.5, facecolor=PALE if place % 2 else "white"))
        ax.text(1, y, track, va="center", fontsize=7)
        _place(ax, 23, y, place + 2)
        for on, name, start, length in events:
            if on != track:
                continue
            width = max(scale * length, 0.06)
            colour = WAIT if "ynchronize" in name else TRACK_COLOURS.get(track.split()[0].rstrip(":"), "#88CCEE")
            ax.add_patch(
                Rectangle(
                    (26 + scale * start, y - 0.55), width, 1.1, facecolor=colour, edgecolor="white", linewidth=0.2
                )
            )
            ink = INK if colour == "#88CCEE" else "white"
            if width > 9:
                ax.text(
                    26 + scale * start + width / 2,
                    y,
                    name[: int(width)],
                    ha="center",
                    va="center",
                    fontsize=6,
                    color=ink,
                )
    _place(ax, 23, 1.9, 1)
    y = 3.6 + 1.7 * len(tracks)
    ax.add_patch(Rectangle((0.5, y - 0.3), 99, 2.6, facecolor="#F7F7F7", edgecolor="#BBBBBB", linewidth=0.5))
    longest = max((event for event in events if event[0] == tracks[-1]), key=lambda event: event[3])
    ax.text(1, y + 0.4, f"Current Selection    Name: {longest[1][:60]}", va="center", fontsize=7)
    ax.text(
        1,
        y + 1.5,
        f"Start: {longest[2]:.3f} ms    Duration: {1e3 * longest[3]:.1f} µs    Thread: {longest[0]}",
        va="center",
        fontsize=7,
    )
    _place(ax, 97, y + 1.0, len(tracks) + 2)
    return figure


def tracks_of(path: Path) -> list[tuple[str, str, float, float]]:
    """Read the last step of a trace of torch.profiler for `draw_perfetto_window`: operators, CUDA calls, streams."""
    with gzip.open(path) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    steps = [
        event
        for event in events
        if event["name"].startswith("ProfilerStep") and event.get("cat") != "gpu_user_annotation"
    ]
    window = (
        steps[-1] if steps else {"ts": min(e["ts"] for e in events), "dur": max(e["ts"] + e["dur"] for e in events)}
    )
    kinds = {
        "cpu_op": "python: operators",
        "cuda_runtime": "python: CUDA calls",
        "kernel": "GPU: stream {}",
        "gpu_memcpy": "GPU: stream {}",
    }
    found: list[tuple[str, str, float, float]] = []
    ends: dict[str, float] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        kind = event.get("cat")
        if kind not in kinds or not window["ts"] <= event["ts"] <= window["ts"] + window["dur"]:
            continue
        track = kinds[kind].format(event.get("args", {}).get("stream", event["tid"]))
        if event["ts"] < ends.get(track, 0.0):  # inside another: Perfetto draws it below, here it is left out
            continue
        ends[track] = event["ts"] + event["dur"]
        found.append((track, event["name"], (event["ts"] - window["ts"]) / 1e3, event["dur"] / 1e3))
    order = list(kinds.values())
    return sorted(found, key=lambda event: (order.index(event[0]) if event[0] in order else len(order), event[2]))
