"""A captured timeline as a picture: NVTX ranges, CUDA calls of the host, and what ran on each stream of the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpscope.reports.figures.style import new_figure, styled
from dpscope.reports.palette import DIRECTION_COLOURS, GREW, INDIGO, is_dark, phase_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

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

    `window_ms`: from when to when, counted from the first event; the whole capture unless given.
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
