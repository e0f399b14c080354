"""Graphs on the CPU for all tests here."""

import pytest

from dpscope.flash import DPFlashOptimizer
from tests.unit.flash.graphed.host_graphs import host_graphs

__all__ = ["host_graphs"]


@pytest.fixture(params=[None, True], ids=["update follows", "update in the graph"], autouse=True)
def fused(request, monkeypatch):
    """Each test with the update after the graph, as on a CPU, and inside of it, as on a GPU."""
    monkeypatch.setattr(
        DPFlashOptimizer.__init__,
        "__kwdefaults__",
        {**DPFlashOptimizer.__init__.__kwdefaults__, "fused": request.param},
    )
    return request.param
