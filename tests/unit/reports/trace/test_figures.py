"""The figures of traces, looked at as a reader would."""

from __future__ import annotations

import pytest

from dpscope.reports.report import compare_results
from dpscope.reports.trace.figures import DRAWINGS
from tests.unit.reports.figure_words import extent, overlapping, texts
from tests.unit.reports.trace_results import GPU, make_trace, operator


def test_figures_are_drawn_from_traces(rows, tmp_path):
    found = rows(standard=make_trace(GPU, 0.0, idle=3.0), flat=make_trace([*GPU, *GPU[:0]], 0.0, idle=4.0))
    drawn = {name: draw(found) for name, (_, draw) in DRAWINGS.items()}
    assert all(figure is not None for figure in drawn.values())
    bars = drawn["trace_phases"].axes[0].patches
    assert sum(bar.get_width() for bar in bars) == pytest.approx(2 * 10.0)  # every bar is a whole unprofiled step


@pytest.mark.parametrize("count", [1, 3])
def test_no_two_words_cover_each_other_in_a_figure(rows, count):
    def many(method):
        return [operator(f"aten::a_rather_long_name_of_{method}_{n}", "clip", 0.1 * 3**n, gpu=True) for n in range(9)]

    methods = ("standard", "flat", "ghost", "flash")[: count + 1]
    found = rows(median=4e3, **{name: make_trace(many(name), 0.0, idle=3.0 * n) for n, name in enumerate(methods)})
    for _, draw in DRAWINGS.values():
        figure = draw(found)
        assert overlapping(figure) == []
        width, height = figure.canvas.get_width_height()
        for text in texts(figure):
            box = extent(text)
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text.get_text()


def test_nothing_is_drawn_without_traces(make_result):
    assert [draw(compare_results([make_result()])) for _, draw in DRAWINGS.values()] == [None, None, None]
