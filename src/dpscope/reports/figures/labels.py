"""Labels that do not cover one another: placed by their measured extents, in pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

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
    points: Sequence[tuple[float, float]],
    texts: Sequence[str],
    colours: Sequence[str],
    *,
    obstacles: Sequence[Bbox],
    **style: Any,
) -> None:
    """Write each text beside its point: inside the axes, off every obstacle and off every other label."""
    from matplotlib.transforms import Bbox

    scale = ax.figure.dpi / 72
    frame = ax.get_window_extent()
    taken, written = list(obstacles), list[Bbox]()
    centred: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center"}
    for point, text, colour in zip(points, texts, colours, strict=True):
        label = ax.annotate(text, point, xytext=(0, 0), color=colour, **centred, **style)
        box = label.get_window_extent()
        x, y = ax.transData.transform(point)
        places = [_offset(radius * scale, angle, box.width, box.height) for radius in RADII for angle in ANGLES]
        boxes = [
            Bbox.from_bounds(x + dx - box.width / 2, y + dy - box.height / 2, box.width, box.height)
            for dx, dy in places
        ]
        costs = [_covered(each, taken, frame) + _crossed((x, y), each, written) for each in boxes]
        best = costs.index(min(costs))
        dx, dy = places[best]
        label.set_position((dx / scale, dy / scale))
        taken.append(boxes[best].padded(scale))
        written.append(boxes[best])
        if RADII[best // len(ANGLES)] > LEADER:
            _lead(ax, point, boxes[best], (x, y))


def in_figure(ax: Axes, pixel: tuple[float, float]) -> tuple[float, float]:
    """The same place as a fraction of the figure: pixels are others in a file of another resolution."""
    x, y = ax.figure.transFigure.inverted().transform(pixel)
    return float(x), float(y)


def _offset(radius: float, angle: float, width: float, height: float) -> tuple[float, float]:
    """From the marker to the centre of a box whose nearest edge or corner is `radius` away in that direction."""
    cos, sin = (round(f(math.radians(angle)), 3) for f in (math.cos, math.sin))
    return radius * cos + _sign(cos) * width / 2, radius * sin + _sign(sin) * height / 2


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _covered(box: Bbox, taken: Sequence[Bbox], frame: Bbox) -> float:
    """Square pixels of a box that are covered by others or lie outside the frame."""
    from matplotlib.transforms import Bbox

    inside = Bbox.intersection(box, frame)
    outside = box.width * box.height - (0.0 if inside is None else inside.width * inside.height)
    shared = (Bbox.intersection(box, other) for other in taken)
    return round(max(outside, 0.0) + sum(part.width * part.height for part in shared if part is not None), 3)


def _crossed(pixel: tuple[float, float], box: Bbox, written: Sequence[Bbox]) -> float:
    """Square pixels of the labels that a line from the marker to a box would run through."""
    end = _nearest(pixel, box)
    line = [(pixel[0] + t / 20 * (end[0] - pixel[0]), pixel[1] + t / 20 * (end[1] - pixel[1])) for t in range(21)]
    return sum(each.width * each.height for each in written if any(each.contains(*place) for place in line))


def _nearest(pixel: tuple[float, float], box: Bbox) -> tuple[float, float]:
    return min(max(pixel[0], box.x0), box.x1), min(max(pixel[1], box.y0), box.y1)


def _lead(ax: Axes, point: tuple[float, float], box: Bbox, pixel: tuple[float, float]) -> None:
    ax.annotate(
        "",
        in_figure(ax, _nearest(pixel, box)),
        xycoords="figure fraction",
        xytext=point,
        textcoords="data",
        arrowprops={"arrowstyle": "-", "color": "0.5", "linewidth": 0.5, "shrinkA": 3, "shrinkB": 1},
    )
