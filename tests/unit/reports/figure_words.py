"""The words of a figure, and which of them cover each other."""

from __future__ import annotations

from itertools import combinations

import pytest
from matplotlib.text import Text


def texts(figure):
    """The words that are drawn, as a renderer gets them: tick labels beyond an axis' limits exist, but are not."""
    drawn = []
    draw = Text.draw

    def note_and_draw(text, renderer):
        if text.get_text().strip() and text.get_visible():
            drawn.append(text)
        draw(text, renderer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", note_and_draw)
        figure.draw_without_rendering()
    return list(dict.fromkeys(drawn))


def written(figure):
    return [text.get_text() for text in texts(figure)]


def extent(text):
    """Of the words alone: an annotation's own extent takes in its arrow."""
    return Text.get_window_extent(text)


def overlapping(figure):
    """Pairs of texts that share a pixel."""
    boxes = [(text.get_text(), extent(text).padded(-0.5)) for text in texts(figure)]
    return [(one, other) for (one, a), (other, b) in combinations(boxes, 2) if a.overlaps(b)]
