"""Graphs of a CPU: what was captured runs again from the captured inputs, and fills the captured tensors."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from dpscope.flash.graphed import step
from dpscope.flash.graphed.step import CapturedStep


class HostGraphs:
    """Stands in for CUDA graphs. `captures` counts what was captured."""

    def __init__(self) -> None:
        self.captures = 0
        self.of: CapturedStep | None = None


def _state(optimizer):
    states = optimizer.original_optimizer.state.values()
    return [each for state in states for name, each in state.items() if name != "step"]


@contextmanager
def _noted_once(update):
    """Let launches of a replay find the rows of the capture, and be noted no second time."""
    if update is None:
        yield
        return
    before = [list(row.counters) for row in update._rows], list(update._parameters)
    update._places.clear()
    yield
    for row, counters in zip(update._rows, before[0], strict=True):
        row.counters = counters
    update._parameters = before[1]


@pytest.fixture
def host_graphs(monkeypatch):
    """Graphs on the CPU, where there are none."""
    graphs = HostGraphs()
    original = CapturedStep.__init__

    def made(self, optimizer, *args, **kwargs):
        graphs.of, graphs.engine = self, optimizer.engine
        original(self, optimizer, *args, **kwargs)

    def record(run, pool):
        graphs.captures += 1
        this, engine = graphs.of, graphs.engine
        begin = {p: total.clone() for p, total in engine.running_sums.items()}
        random = torch.get_rng_state()
        written = [*engine.model.parameters(), *engine.model.buffers(), *_state(this.optimizer)]
        before = [tensor.detach().clone() for tensor in written]
        try:
            result = run()
        finally:  # a capture runs nothing: what this has done is undone
            torch.set_rng_state(random)
            with torch.no_grad():
                for tensor, value in zip(written, before, strict=True):
                    tensor.copy_(value)
            for parameter, total in begin.items():
                this.base._sums[parameter].copy_(total)

        def replay():
            own, static = this._own, this._static
            with torch.enable_grad(), step.capturing(own), engine.capturing(static), _noted_once(this.update):
                if this.base is None:
                    engine.running_sums.clear()
                again = run()
                sums, clipped = engine.captured()
            result.copy_(again)
            for parameter, total in sums.items():
                if this._sums[parameter] is not total:
                    this._sums[parameter].copy_(total)
            for old, new in zip(this._clipped[:3], clipped[:3], strict=True):
                old.copy_(new)
            if clipped.observed is not None:
                this._clipped.observed.copy_(clipped.observed)

        return replay, result

    monkeypatch.setattr(CapturedStep, "__init__", made)
    monkeypatch.setattr(step, "record", record)
    monkeypatch.setattr(step, "has_graphs", lambda device: True)
    return graphs
