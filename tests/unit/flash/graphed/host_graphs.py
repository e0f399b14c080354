"""Graphs of a CPU: what was captured runs again from the captured inputs, and fills the captured tensors."""

from __future__ import annotations

import pytest
import torch

from dpscope.flash.graphed import captured_step, step
from dpscope.flash.graphed.captured_step import CapturedStep


class HostGraphs:
    """Stands in for CUDA graphs. `captures` counts what was captured."""

    def __init__(self) -> None:
        self.captures = 0
        self.of: CapturedStep | None = None


@pytest.fixture
def host_graphs(monkeypatch):
    """Graphs on the CPU, where there are none."""
    graphs = HostGraphs()
    original = CapturedStep.__init__

    def made(self, engine, *args, **kwargs):
        graphs.of, graphs.engine = self, engine
        original(self, engine, *args, **kwargs)

    def record(run, pool):
        graphs.captures += 1
        this, engine = graphs.of, graphs.engine
        begin = {p: total.clone() for p, total in engine.running_sums.items()}
        random = torch.get_rng_state()
        result = run()  # a capture runs nothing: what this has done is undone
        torch.set_rng_state(random)
        for parameter, total in begin.items():
            this.base._batch.sums[parameter].copy_(total)

        def replay():
            own, static = this._own, this._static
            with torch.enable_grad(), captured_step.capturing(own), engine.capturing(static):
                if this.base is None:
                    engine.running_sums.clear()
                again = run()
                batch = engine.captured()
            result.copy_(again)
            for parameter, total in batch.sums.items():
                if this._batch.sums[parameter] is not total:
                    this._batch.sums[parameter].copy_(total)
            for old, new in zip(this._batch[1:4], batch[1:4], strict=True):
                old.copy_(new)
            if batch.observed is not None:
                this._batch.observed.copy_(batch.observed)

        return replay, result

    monkeypatch.setattr(CapturedStep, "__init__", made)
    monkeypatch.setattr(captured_step, "record", record)
    monkeypatch.setattr(step, "has_graphs", lambda device: True)
    return graphs
