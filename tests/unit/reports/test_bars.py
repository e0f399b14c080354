"""Stacked bars: where parts stand, what is written in them, and which panels carry the scale."""

from __future__ import annotations

import pytest

from dpscope.reports.drawing import BarPanel, draw_bars, filled
from tests.unit.reports.figure_words import overlapping, texts

LOOKS = {"read": filled("#4477AA"), "written": filled("#DDAA33", hatched=True)}


def panel(names=("flat", "ghost"), read=(40.0, 30.0), written=(20.0, -10.0), **options):
    ends = [f"end of {name}" for name in names]
    return BarPanel(names=names, parts={"read": read, "written": written}, ends=ends, axis="gigabytes", **options)


def spans(ax):
    """Label and place -> where the segment begins and ends."""
    return {bar.get_gid(): (bar.get_x(), bar.get_x() + bar.get_width()) for bar in ax.patches}


def test_parts_stand_behind_each_other_and_what_is_below_zero_left_of_it():
    (ax,) = draw_bars(["title"], [panel()], LOOKS).axes
    assert spans(ax) == {"read:0": (0, 40), "written:0": (40, 60), "read:1": (0, 30), "written:1": (0, -10)}


def test_a_figure_stands_in_every_segment_that_has_room_for_it_and_in_no_other():
    figure = draw_bars(["title"], [panel(read=(4000.0, 30.0), written=(2000.0, None))], LOOKS)
    written = [text.get_text() for text in texts(figure)]
    assert "4000" in written and "2000" in written and "30.0" not in written
    plain = draw_bars(["title"], [panel(inside=False)], LOOKS)
    assert "40.0" not in [text.get_text() for text in texts(plain)]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_panels_share_a_scale_that_the_lowest_of_each_column_carries(count):
    panels = [panel(title=f"size {number}", read=(40.0, 10.0 * number)) for number in range(count)]
    figure = draw_bars(["title"], panels, LOOKS, columns=2)
    drawn = figure.axes[:count]
    assert len({ax.get_xlim() for ax in drawn}) == 1
    lowest = [ax.get_xlabel() == "gigabytes" and ax.xaxis.get_tick_params()["labelbottom"] for ax in drawn]
    assert lowest == [number + 2 >= count for number in range(count)]
    assert overlapping(figure) == []


def test_bars_of_estimates_are_pale_and_a_panel_without_bars_says_why():
    nothing = BarPanel(names=(), parts={}, ends=(), axis="nothing to compare with")
    left, right = draw_bars(["title"], [panel(pale=[1]), nothing], LOOKS, columns=2, one_scale=False).axes
    assert [bar.get_alpha() for bar in left.patches] == [None, None, 0.55, 0.55]
    assert [text.get_text() for text in right.texts] == ["nothing to compare with"]
