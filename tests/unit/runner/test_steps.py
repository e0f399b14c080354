"""A loss that is inf or NaN makes a failed row that names the step, under every instrument and for every method."""

from __future__ import annotations

import textwrap

import pytest
import torch

from dpscope.errors import MeasurementFailed
from dpscope.instruments import timing
from dpscope.runner.measure import measure_or_explain
from dpscope.runner.ranged_step import run_captured_steps, run_ranged_step
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import workload_at

WORKLOADS = """
    import math
    import torch
    from torch import nn
    from dpscope import Workload

    def workload(factor, batch_size):
        calls = []

        def loss(model, x):
            calls.append(1)
            return model(x).square().mean(1) * factor(len(calls))

        return Workload(
            model=lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)),
            batch=lambda seed, device: torch.ones(batch_size, 6, device=device),
            loss=loss,
        )

    def fine(batch_size):
        return workload(lambda call: 1.0, batch_size)

    def never_finite(batch_size):
        return workload(lambda call: math.nan, batch_size)

    def infinite_from_the_second(batch_size):
        return workload(lambda call: math.inf if call >= 2 else 1.0, batch_size)

    def nan_from_the_fourth(batch_size):
        return workload(lambda call: math.nan if call >= 4 else 1.0, batch_size)

    def gradient_not_finite(batch_size):
        \"\"\"sqrt has an infinite slope at zero: the loss is finite until the update.\"\"\"
        return Workload(
            model=lambda: nn.Linear(6, 2),
            batch=lambda seed, device: torch.ones(batch_size, 6, device=device),
            loss=lambda model, x: model(x).sub(model(x).detach()).abs().sqrt().mean(1),
        )
"""


@pytest.fixture
def spec_of(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(WORKLOADS))

    def make(name, *, warmup=2, steps=3, **settings):
        settings = {"method": "standard", "batch_size": 4, "warmup": warmup, "steps": steps, **settings}
        return RunSpec(workload=workload_at(f"{file}:{name}"), device="cpu", **settings)

    return make


@pytest.mark.parametrize(
    ("method", "instrument"),
    [
        *(("standard", instrument) for instrument in ("time", "memory", "trace", "ncu")),
        *(("flash", instrument) for instrument in ("time", "memory")),
        ("flat", "trace"),
        ("ghost", "ncu"),
    ],
)
def test_a_loss_that_is_never_finite_fails_the_row_at_its_first_step(spec_of, method, instrument):
    result = measure_or_explain(spec_of("never_finite", method=method, instrument=instrument))
    assert result.status == "failed"
    assert result.reason.startswith("the loss is nan from the first step on (warm-up step 1), before any update")
    assert result.details is None and result.avg_time_ms is None


@pytest.mark.parametrize("instrument", ["time", "memory", "trace"])
@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("infinite_from_the_second", "the loss is inf from warm-up step 2 on"),
        ("nan_from_the_fourth", "the loss is nan from step 2 after the warm-up on"),
    ],
)
def test_the_reason_names_the_step_at_which_it_began(spec_of, name, begins, instrument):
    result = measure_or_explain(spec_of(name, instrument=instrument, learning_rate=0.5))
    assert result.status == "failed"
    assert result.reason.startswith(begins) and "Try --learning-rate 0.005" in result.reason


def test_without_warm_up_steps_are_counted_from_one(spec_of):
    result = measure_or_explain(spec_of("nan_from_the_fourth", warmup=0, steps=5))
    assert result.reason.startswith("the loss is nan from step 4 on")


def test_training_that_diverges_is_a_failed_row(spec_of):
    result = measure_or_explain(spec_of("fine", optimizer="sgd", learning_rate=1e6, steps=30))
    assert result.status == "failed" and "training diverges" in result.reason


@pytest.mark.parametrize("instrument", ["time", "memory", "trace", "ncu"])
def test_parameters_that_the_last_update_made_nan_are_found_where_no_loss_shows_them(spec_of, instrument):
    result = measure_or_explain(spec_of("gradient_not_finite", warmup=0, steps=1, instrument=instrument))
    assert result.status == "failed" and ("holds inf or NaN" in result.reason or "the loss is nan" in result.reason)


def test_a_finite_loss_is_an_ok_row(spec_of):
    assert measure_or_explain(spec_of("fine")).ok


def test_what_ncu_and_nsys_look_at_fails_likewise(spec_of, monkeypatch):
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with pytest.raises(MeasurementFailed, match=r"from the first step on \(warm-up step 1\)"):
        run_ranged_step(spec_of("never_finite", instrument="ncu"))
    with pytest.raises(MeasurementFailed, match="from step 2 after the warm-up on"):
        run_captured_steps(spec_of("nan_from_the_fourth", instrument="nsys"))


def test_no_loss_is_read_while_steps_are_timed(spec_of, monkeypatch):
    """Reading one waits for the GPU, and would change what is measured."""
    happened = []
    mark, to_float = timing.CpuClock.mark, torch.Tensor.__float__
    monkeypatch.setattr(timing.CpuClock, "mark", lambda clock: [happened.append("mark"), mark(clock)])
    monkeypatch.setattr(torch.Tensor, "__float__", lambda tensor: [happened.append("read"), to_float(tensor)][1])
    assert measure_or_explain(spec_of("fine", warmup=2, steps=3)).ok
    assert happened[:6] == ["read"] * 2 + ["mark"] * 4 and set(happened[6:]) == {"read"}
