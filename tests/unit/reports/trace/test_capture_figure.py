"""The picture of a captured timeline."""

from __future__ import annotations

from dpscope.instruments.nsys.reading import read_timeline
from dpscope.instruments.nsys.views import lanes
from dpscope.reports.trace.figures import draw_capture
from tests import DATA


def test_ranges_calls_and_streams_each_have_a_lane():
    figure = draw_capture(lanes(read_timeline(DATA / "nsys_nvtx_step.sqlite")), title="a step", window_ms=(0, 20))
    (ax,) = figure.axes
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        *("NVTX 1", "NVTX 2", "NVTX 3"),
        *("CUDA calls", "stream 7"),
    ]
    assert ax.get_xlim() == (0, 20)
    assert {"step", "forward", "backward"} <= {text.get_text() for text in ax.texts}
