"""Labels that do not cover one another: placed by their measured extents, in pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Pixel = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, right, top

RADII = (7.0, 11.0, 16.0, 22.0, 30.0, 40.0, 52.0, 66.0, 84.0, 104.0, 130.0)  # points from a marker to its label
ANGLES = (0, 180, 90, -90, 45, -45, 135, -135)  # degrees, in order of preference
LEADER = 12.0  # points: a label farther away than this gets a line to its marker


def spread(centres: Sequence[float], widths: Sequence[float], low: float, high: float, gap: float) -> list[float]:
    """Centres moved as little as a left-to-right pass allows, so that the widths neither overlap nor leave the range.

    Takes centres in ascending order; the widths and gaps together have to fit between `low` and `high`.
    """
    placed: list[float] = []
    edge = low - gap
    for centre, width in zip(centres, widths, strict=True):
        placed.append(max(centre, edge + gap + width / 2))
        edge = placed[-1] + width / 2
    edge = high + gap
    for place in reversed(range(len(placed))):
        placed[place] = min(placed[place], edge - gap - widths[place] / 2)
        edge = placed[place] - widths[place] / 2
    return placed


def label_points(
    ax: Axes,
    labels: Sequence[tuple[tuple[float, float], str, str]],
    *,
    obstacles: Sequence[Box],
    **style: Any,
) -> None:
    """Write each text beside its point, in its colour: inside the axes, off every obstacle and every other label."""
    scale = ax.figure.dpi / 72
    frame = tuple(ax.get_window_extent().extents)
    written: list[Box] = []
    centred: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center"}
    for point, text, colour in labels:
        label = ax.annotate(text, point, xytext=(0, 0), color=colour, **centred, **style)
        extent = label.get_window_extent()
        x, y = ax.transData.transform(point)
        radius, (dx, dy), box = _best_place((x, y), (extent.width, extent.height), scale, frame, obstacles, written)
        label.set_position((dx / scale, dy / scale))
        written.append(box)
        if radius > LEADER:
            line = {"arrowstyle": "-", "color": "0.5", "linewidth": 0.5, "shrinkA": 3, "shrinkB": 1}
            end = in_figure(ax, _nearest((x, y), box))
            ax.annotate("", end, xycoords="figure fraction", xytext=point, textcoords="data", arrowprops=line)


def _best_place(
    pixel: Pixel,
    size: tuple[float, float],
    scale: float,
    frame: tuple[float, ...],
    obstacles: Sequence[Box],
    written: Sequence[Box],
) -> tuple[float, Pixel, Box]:
    """The nearest place where a label covers nothing, or else the one where it covers least."""
    places = []
    width, height = size
    for radius in RADII:
        for angle in ANGLES:
            dx, dy = _offset(radius * scale, angle, width, height)
            x, y = pixel[0] + dx, pixel[1] + dy
            box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
            outside = width * height - _shared(box, (frame[0], frame[1], frame[2], frame[3]))
            apart = (box[0] - scale, box[1] - scale, box[2] + scale, box[3] + scale)
            covered = sum(_shared(apart, other) for other in (*obstacles, *written))
            cost = round(outside + covered, 3) + _crossed(pixel, box, written)
            if not cost:
                return radius, (dx, dy), box
            places.append((cost, radius, (dx, dy), box))
    return min(places)[1:]


def in_figure(ax: Axes, pixel: Pixel) -> tuple[float, float]:
    """The same place as a fraction of the figure: pixels are others in a file of another resolution."""
    x, y = ax.figure.transFigure.inverted().transform(pixel)
    return float(x), float(y)


def _offset(radius: float, angle: float, width: float, height: float) -> tuple[float, float]:
    """From the marker to the centre of a box whose nearest edge or corner is `radius` away in that direction."""
    cos, sin = (round(f(math.radians(angle)), 3) for f in (math.cos, math.sin))
    return radius * cos + ((cos > 0) - (cos < 0)) * width / 2, radius * sin + ((sin > 0) - (sin < 0)) * height / 2


def _shared(one: Box, other: Box) -> float:
    """Square pixels that two boxes have in common."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0.0) * max(height, 0.0)


def _crossed(pixel: Pixel, box: Box, written: Sequence[Box]) -> int:
    """How many labels a line from the marker to a box would run through; each weighs as much as a square pixel."""
    end = _nearest(pixel, box)
    line = [(pixel[0] + t / 20 * (end[0] - pixel[0]), pixel[1] + t / 20 * (end[1] - pixel[1])) for t in range(21)]
    return sum(any(b[0] <= x <= b[2] and b[1] <= y <= b[3] for x, y in line) for b in written)


def _nearest(pixel: Pixel, box: Box) -> Pixel:
    return min(max(pixel[0], box[0]), box[2]), min(max(pixel[1], box[1]), box[3])
