"""Points with names that do not cover one another: placed by their measured extents, in pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpscope.reports.figures.style import SMALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Pixel = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, right, top

RADII = (7.0, 11.0, 16.0, 22.0, 30.0, 40.0, 52.0, 66.0, 84.0, 104.0, 130.0)  # points from a marker to its label
ANGLES = (0, 180, 90, -90, 45, -45, 135, -135)  # degrees, in order of preference
LEADER = 12.0  # points: a label farther away than this gets a line to its marker


@dataclass(frozen=True, kw_only=True)
class Point:
    x: float
    y: float
    label: str  # "" for a point without a name
    colour: str
    marker: str
    spread: tuple[float, float] | None = None  # of x: 10th and 90th percentile
    size: float = 6.0  # points
    hollow: bool = False

    @property
    def look(self) -> dict[str, Any]:
        fill = "white" if self.hollow else self.colour
        return {"marker": self.marker, "color": self.colour, "markersize": self.size, "markerfacecolor": fill}

    def box(self, ax: Axes) -> Box:
        """Return the pixels that its marker and its spread take."""
        half = (self.size / 2 + 1) * ax.figure.dpi / 72
        ends = (self.x, *(self.spread or ()))
        (left, y), (right, _) = ax.transData.transform([(min(ends), self.y), (max(ends), self.y)])
        return left - half, y - half, right + half, y + half


def draw_points(ax: Axes, points: Sequence[Point]) -> None:
    """Draw the points, the small ones behind the others."""
    for point in points:
        low, high = point.spread or (point.x, point.x)
        spread = [[max(point.x - low, 0.0)], [max(high - point.x, 0.0)]] if point.spread else None
        ax.errorbar(point.x, point.y, xerr=spread, elinewidth=1.0, capsize=2, ls="", zorder=point.size, **point.look)


def name_points(ax: Axes, points: Sequence[Point], taken: Sequence[Box] = ()) -> None:
    """Write each name beside its point in its colour: inside the axes, clear of markers, names and `taken` places."""
    scale = ax.figure.dpi / 72
    obstacles, written = [*taken, *(point.box(ax) for point in points)], list[Box]()
    centred: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": SMALL}
    for point in points:
        if not point.label:
            continue
        at = (point.x, point.y)
        label = ax.annotate(point.label, at, xytext=(0, 0), color=point.colour, **centred)
        extent, pixel = label.get_window_extent(), tuple(ax.transData.transform(at))
        frame = box_of(ax)
        radius, (dx, dy), box = _best_place(pixel, (extent.width, extent.height), scale, frame, obstacles, written)
        label.set_position((dx / scale, dy / scale))
        written.append(box)
        if radius > LEADER:
            line = {"arrowstyle": "-", "color": "0.5", "linewidth": 0.5, "shrinkA": 3, "shrinkB": 1}
            end = in_figure(ax, _nearest(pixel, box))
            ax.annotate("", end, xycoords="figure fraction", xytext=at, textcoords="data", arrowprops=line)


def box_of(artist: Any, pad: float = 0.0) -> Box:
    """Return the box of an artist in pixels, with a margin."""
    left, bottom, right, top = artist.get_window_extent().padded(pad).extents
    return left, bottom, right, top


def in_figure(ax: Axes, pixel: Pixel) -> Pixel:
    """Return the place as a fraction of the figure, because files of another resolution have other pixels."""
    x, y = ax.figure.transFigure.inverted().transform(pixel)
    return float(x), float(y)


def _best_place(
    pixel: Pixel, size: Pixel, scale: float, frame: Box, obstacles: Sequence[Box], written: Sequence[Box]
) -> tuple[float, Pixel, Box]:
    """Return the nearest place where a label covers nothing, or else the one where it covers least."""
    width, height = size

    def place(radius: float, angle: float) -> tuple[float, Pixel, Box]:
        """Return a box whose nearest edge or corner is `radius` away in a direction, and the offset of its centre."""
        cos, sin = (round(f(math.radians(angle)), 3) for f in (math.cos, math.sin))
        dx = radius * scale * cos + ((cos > 0) - (cos < 0)) * width / 2
        dy = radius * scale * sin + ((sin > 0) - (sin < 0)) * height / 2
        x, y = pixel[0] + dx - width / 2, pixel[1] + dy - height / 2
        return radius, (dx, dy), (x, y, x + width, y + height)

    def cost(found: tuple[float, Pixel, Box]) -> float:
        left, bottom, right, top = box = found[-1]
        apart = (left - scale, bottom - scale, right + scale, top + scale)
        covered = sum(_shared(apart, other) for other in (*obstacles, *written))
        return round(width * height - _shared(box, frame) + covered, 3) + _crossed(pixel, box, written)

    return min((place(radius, angle) for radius in RADII for angle in ANGLES), key=cost)


def _shared(one: Box, other: Box) -> float:
    """Return the square pixels that two boxes have in common."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0.0) * max(height, 0.0)


def _crossed(pixel: Pixel, box: Box, written: Sequence[Box]) -> int:
    """Return the cost of labels that a line from the marker to a box crosses; each costs one square pixel."""
    end = _nearest(pixel, box)
    line = [(pixel[0] + t / 20 * (end[0] - pixel[0]), pixel[1] + t / 20 * (end[1] - pixel[1])) for t in range(21)]
    return sum(any(b[0] <= x <= b[2] and b[1] <= y <= b[3] for x, y in line) for b in written)


def _nearest(pixel: Pixel, box: Box) -> Pixel:
    return min(max(pixel[0], box[0]), box[2]), min(max(pixel[1], box[1]), box[3])
