"""The figures of traffic: sizes side by side, since what grows with the size is the question."""

from __future__ import annotations

from functools import partial

from dpscope.reports.output import figure_output
from dpscope.reports.traffic.bytes_figure import draw_traffic_bytes
from dpscope.reports.traffic.roofline_figure import draw_roofline

_figure = partial(figure_output, instrument="ncu", sizes_apart=False)

TRAFFIC_FIGURES = (
    _figure("roofline", "operations a byte against what the GPU can do", draw_roofline),
    _figure("traffic_bytes", "DRAM bytes of a step by family of kernels", draw_traffic_bytes),
)
