"""NVTX ranges carry the names of the phases, nest as they do, and are nothing where nobody asked or nobody can."""

from __future__ import annotations

import timeit

import pytest
import torch

from dpscope.instruments import nvtx
from dpscope.instruments.nvtx import nvtx_phases, nvtx_range
from dpscope.runner.steps import make_trainer
from dpscope.vocabulary.phases import BACKWARD, CLIP, FORWARD, phase


@pytest.fixture
def timeline(monkeypatch):
    """A torch with NVTX, whose pushes and pops are written down."""
    lines = []
    monkeypatch.setattr(torch._C, "_nvtx", object(), raising=False)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: lines.append(f"+{name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: lines.append("-"))
    return lines


def test_every_phase_of_a_step_is_a_range_of_the_same_name(make_spec, timeline):
    trainer, batch = make_trainer(make_spec(method="ghost"))
    with nvtx_phases():
        trainer.train_step(batch)
    assert timeline == [
        *("+forward", "-", "+backward", "+clip", "-", "-"),
        *("+noise", "-", "+optimizer", "-"),
    ]


def test_no_range_is_pushed_unless_asked_for(make_spec, timeline):
    trainer, batch = make_trainer(make_spec(method="flat"))
    with nvtx_phases():
        pass
    trainer.train_step(batch)
    assert timeline == []


def test_a_phase_without_a_listener_costs_next_to_nothing():
    """Less than half of what `record_function` costs with no profiler (10.7 µs). The best of many: others work too."""

    def empty_phase():
        with phase(FORWARD):
            pass

    assert min(timeit.repeat(empty_phase, number=1000, repeat=20)) / 1000 < 5e-6


def test_a_range_that_fails_is_closed(timeline):
    with pytest.raises(RuntimeError, match="broken"), nvtx_phases(), phase(BACKWARD), phase(CLIP):
        raise RuntimeError("broken")
    assert timeline == ["+backward", "+clip", "-", "-"]


def test_a_range_decorates_a_function(timeline):
    @nvtx_range("double")
    def double(x):
        return 2 * x

    assert [double(2), double(3)] == [4, 6]
    assert timeline == ["+double", "-", "+double", "-"]


@pytest.mark.skipif(nvtx.nvtx_available(), reason="a CUDA build of torch")
def test_on_a_build_without_cuda_ranges_are_nothing(make_spec):
    with pytest.raises(RuntimeError, match="NVTX"):
        torch.cuda.nvtx.range_push("as it is without a guard")
    trainer, batch = make_trainer(make_spec())
    with nvtx_phases(autograd=True), nvtx_range("mine"):
        trainer.train_step(batch)


def test_operators_get_ranges_on_request(monkeypatch, timeline):
    asked = []

    class EmitNvtx:
        def __enter__(self):
            asked.append("operators")

        def __exit__(self, *error):
            asked.append("end")

    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", EmitNvtx)
    with nvtx_phases():
        pass
    assert asked == []
    with nvtx_phases(autograd=True):
        assert asked == ["operators"]
    assert asked == ["operators", "end"]
