"""Rows with --compile: compilation is timed apart from steps, and what it could not do is said."""

from __future__ import annotations

import textwrap
from inspect import signature

import pytest
import torch

from dpscope.endings import outcome_of_exception
from dpscope.runner.measure import measure_or_explain
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import workload_at
from tests.compiled_here import aot_eager  # noqa: F401
from tests.torch_here import takes_compiled

WORKLOADS = """
    import torch
    from torch import nn
    from dpscope import Workload

    class Net(nn.Sequential):
        def without_tanh(self, x):
            return self[2](self[0](x))

    def workload(loss):
        return Workload(
            model=lambda: Net(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)),
            batch=lambda seed, device: torch.ones(3, 6, device=device),
            loss=loss,
        )

    def fine():
        return workload(lambda model, x: model(x).square().mean(1))

    def parts_alone():
        return workload(lambda model, x: model.without_tanh(x).square().mean(1))

    def broken():
        class Printing(Net):
            def forward(self, x):
                x = self[0](x)
                torch._dynamo.graph_break()
                return self[2](self[1](x))

        return Workload(
            model=lambda: Printing(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)),
            batch=lambda seed, device: torch.ones(3, 6, device=device),
            loss=lambda model, x: model(x).square().mean(1),
        )
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled") / "workloads.py"
    path.write_text(textwrap.dedent(WORKLOADS))
    return path


@pytest.fixture
def measured(file, aot_eager):  # noqa: F811
    def measure(function, method="standard", **more):
        values = {"batch_size": 3, "warmup": 1, "steps": 5, "compile": "default", **more}
        return measure_or_explain(RunSpec(workload=workload_at(f"{file}:{function}"), method=method, **values))

    return measure


@pytest.mark.parametrize("method", ["standard", pytest.param("flash", marks=takes_compiled)])
def test_compilation_is_timed_apart_from_the_steps(measured, method):
    result = measured("fine", method)
    assert result.ok, result.reason
    found = result.timing["compilation"]
    assert found["graphs"] >= 1
    assert found["recompiles"] == 0
    assert found["seconds"] > 10 * max(result.timing["step_ms"]) / 1e3
    assert len(result.timing["step_ms"]) == 5


@pytest.mark.usefixtures("aot_eager")
def test_checkpointed_blocks_are_compiled_with_the_rest(make_spec):
    result = measure_or_explain(make_spec(compile="default", checkpoint_blocks=True))
    assert result.ok, result.reason
    assert result.timing["compilation"]["graphs"] == 1


def test_an_eager_row_says_nothing_of_compilation(measured):
    result = measured("fine", compile="none")
    assert result.ok
    assert "compil" not in result.to_json().replace(result.spec["workload"]["file"], "")


def test_graph_breaks_are_a_note(measured):
    result = measured("broken")
    assert result.ok, result.reason
    assert result.timing["compilation"]["graph_breaks"] == 1
    (note,) = result.notes
    assert "made 2 graphs" in note["sentence"]


def test_graphs_that_are_compiled_while_steps_are_timed_are_a_note(measured, monkeypatch):
    from dpscope.runner.measurements import time as measurement

    def time_and_recompile(step, **options):
        torch._dynamo.reset()  # as a guard that fails would
        return original(step, **options)

    original = measurement.time_steps
    monkeypatch.setattr(measurement, "time_steps", time_and_recompile)
    result = measured("fine")
    assert result.timing["compilation"]["recompiles"] == 1
    assert "while steps were measured" in result.notes[0]["sentence"]


def test_a_row_in_which_nothing_was_compiled_is_no_compiled_row(measured):
    result = measured("parts_alone")
    assert result.status == "skipped"
    assert "compiled nothing" in result.reason
    assert "model(inputs)" in result.reason


@pytest.mark.parametrize("method", ["flat", "ghost"])
def test_opacus_s_rows_say_why_they_cannot_be_compiled(measured, method):
    result = measured("fine", method)
    assert result.status == "skipped"
    assert "opacus/issues/575" in result.reason
    assert "--compile none" in result.reason


def test_a_method_of_another_package_is_asked_whether_it_can(measured, monkeypatch):
    from dpscope.trainers.base import StandardTrainer

    monkeypatch.delattr(StandardTrainer, "compile")
    result = measured("fine")
    assert result.status == "skipped"
    assert "StandardTrainer does not say that it can" in result.reason


def test_the_peak_of_a_compiled_step_is_told_as_far_as_it_is_known(measured):
    result = measured("fine", instrument="memory")
    assert result.ok, result.reason
    memory = result.memory
    assert memory["source"] == "compiled"
    assert memory["peak"]["components"]["model_parameters"] == 4 * (6 * 5 + 5 + 5 * 2 + 2)
    assert sum(memory["peak"]["components"].values()) == memory["peak_bytes"]
    (rest,) = memory["unattributed"]
    assert "compiled" in rest["what"]
    assert rest["bytes"] == memory["peak"]["components"]["unattributed"] > 0


def test_an_estimate_counts_the_operators_that_were_compiled(measured):
    eager, compiled = (measured("fine", instrument="ncu", compile=mode) for mode in ("none", "default"))
    assert compiled.ok, compiled.reason
    assert compiled.ncu["traffic"] == eager.ncu["traffic"]
    assert any("without fusion" in spot for spot in compiled.ncu["estimate"]["blind_spots"])


def test_a_trace_is_of_steps_in_which_nothing_compiles(measured):
    result = measured("fine", instrument="trace")
    assert result.ok, result.reason
    phases = {each["phase"] for each in result.trace["phases"]}
    assert {"forward", "backward", "optimizer"} <= phases
    assert not any("compile_inner" in str(each) for each in result.trace["operators"])
    refused = measured("fine", instrument="trace", options={"modules": True})
    assert refused.status == "skipped"
    assert "has no modules" in refused.reason


def test_a_machine_without_a_compiler_has_failed_rows_and_no_traceback(measured, monkeypatch):
    def no_compiler():
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", no_compiler)
    result = measured("fine")
    assert (result.status, result.details) == ("failed", None)
    assert result.reason.startswith("torch.compile finds no C++ compiler: install g++")


def test_a_compiler_that_fails_is_named_as_the_one_that_did():
    from torch._dynamo.exc import BackendCompilerFailed

    def inductor():
        pass

    def failed(error):
        frames = len(signature(BackendCompilerFailed).parameters) - 2  # one, from torch 2.7 on
        return outcome_of_exception(BackendCompilerFailed(inductor, error, *[None] * frames))

    status, reason = failed(OSError("Python.h: no such file"))
    assert status == "failed"
    assert reason.startswith("torch.compile failed (OSError: Python.h: no such file): `dpscope doctor`")
    assert failed(torch.OutOfMemoryError("CUDA out of memory"))[0] == "oom"


def test_a_loss_that_is_not_finite_names_the_step_of_compilation(measured, monkeypatch):
    from dpscope.runner.steps import TrainingSteps

    def infinite(self):
        self._losses.append(float("inf"))

    monkeypatch.setattr(TrainingSteps, "__call__", infinite)
    result = measured("fine")
    assert result.status == "failed"
    assert "step 1 of compilation" in result.reason
