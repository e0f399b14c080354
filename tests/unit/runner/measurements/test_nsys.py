"""From a spec to a result with an nsys that records nothing: figures, files, and what is said where there are none."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from dpscope.errors import UserError
from dpscope.instruments.nsys.reading import read_timeline
from dpscope.instruments.nsys.summary import summarise_timeline
from dpscope.instruments.timing import no_progress
from dpscope.runner import measure as environment
from dpscope.runner import ranged_step
from dpscope.runner.measure import measure, measure_or_explain
from dpscope.runner.ranged_step import program
from dpscope.workloads.configs import find_workload
from tests.fake_tools import nsys as fake_nsys
from tests.fake_tools.nsys_exports import Export, a_step


@pytest.fixture
def nsys(monkeypatch, tmp_path):
    """Install an nsys, on a machine whose GPU is made believe."""
    monkeypatch.setattr(environment, "collect", lambda device: {"gpu": "a GPU"})

    def install(**behaviour):
        export = a_step(tmp_path / "step.sqlite").write()
        installed = fake_nsys.install(tmp_path / "nsight", **{"export": export, **behaviour})
        monkeypatch.setenv("NSYS", str(installed))
        return installed

    return install


@pytest.fixture
def spec(make_spec):
    return make_spec(method="ghost", device="cuda", instrument="nsys")


def test_a_result_holds_the_figures_of_the_capture_and_names_its_files(nsys, spec, tmp_path):
    nsys()
    result = measure(spec, no_progress, tmp_path / "files" / "row")
    assert result.ok, result.reason
    expected = summarise_timeline(read_timeline(tmp_path / "step.sqlite"))
    assert {name: result.nsys[name] for name in expected} == json.loads(json.dumps(expected))
    assert result.nsys["nsys_version"] == "2025.3.1.90"
    assert result.files == {
        "Nsight Systems report": "files/row/ghost_tiny_bs2_seq8_fp32.nsys-rep",
        "its SQLite export": "files/row/ghost_tiny_bs2_seq8_fp32.sqlite",
    }
    assert all((tmp_path / path).exists() for path in result.files.values())


def test_what_is_asked_for_is_what_nsys_is_told(nsys, make_spec, tmp_path):
    nsys()
    options = {"trace": "cuda,nvtx", "gpu_metrics": True}
    spec = make_spec(device="cuda", instrument="nsys", options=options)
    result = measure(spec, no_progress, tmp_path / "files" / "row")
    (report,) = (tmp_path / "files" / "row").glob("*.nsys-rep")
    told = json.loads(report.read_text())["arguments"]
    assert told == result.nsys["command"][1:]
    assert {"--trace=cuda,nvtx", "--gpu-metrics-devices=all"} <= set(told)
    assert json.loads(told[-1]) == spec.to_dict()


def test_a_token_in_the_environment_reaches_neither_report_nor_result(monkeypatch, nsys, spec, tmp_path):
    nsys()
    monkeypatch.setenv("HF_TOKEN", "s3cr3t")
    monkeypatch.setenv("SOMETHING_ELSE", "s3cr3t")
    result = measure(spec, no_progress, tmp_path / "files" / "row")
    assert result.ok
    written = [path.read_bytes() for path in (tmp_path / "files").rglob("*") if path.is_file()]
    assert len(written) == 2
    assert not any(b"s3cr3t" in content for content in written)
    assert "s3cr3t" not in result.to_json()


@pytest.mark.slow
def test_a_program_that_fails_is_the_reason_and_not_nsys(nsys, make_spec, tmp_path):
    """The program really runs, of a workload that cannot be made."""
    (tmp_path / "own.py").write_text("def broken(seq_len):\n    raise ZeroDivisionError('no such thing')\n")
    nsys(runs=True)
    spec = make_spec(workload=find_workload(f"{tmp_path}/own.py:broken"), device="cuda", instrument="nsys")
    result = measure(spec, no_progress, tmp_path / "files" / "row")
    assert not result.ok
    assert result.reason == "under nsys: ZeroDivisionError: no such thing"
    assert "Traceback" in result.details


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        ({"leaves": None, "says": fake_nsys.NOTHING_RECORDED}, "recorded nothing"),
        ({"leaves": ".qdstrm", "says": fake_nsys.NO_IMPORTER}, "QdstrmImporter -i"),
        ({"export": None}, "nsys export --type=sqlite"),
    ],
)
def test_a_capture_without_figures_is_a_failed_row_with_a_remedy(nsys, spec, tmp_path, behaviour, says):
    nsys(**behaviour)
    result = measure(spec, no_progress, tmp_path / "files" / "row")
    assert result.status == "failed"
    assert says in result.reason
    assert all((tmp_path / path).exists() for path in result.files.values())
    assert bool(result.files) == (behaviour.get("leaves", "report") is not None)


def test_an_empty_capture_is_a_failed_row(nsys, spec, tmp_path):
    nsys(export=Export(tmp_path / "empty.sqlite").write())
    result = measure(spec, no_progress, tmp_path / "files" / "row")
    assert result.status == "failed"
    assert "holds no GPU work" in result.reason


def test_without_nsys_or_gpu_a_row_is_skipped_with_a_remedy(monkeypatch, spec, make_spec):
    monkeypatch.setattr(environment, "collect", lambda device: {})
    monkeypatch.setenv("NSYS", "/not/there/nsys")
    missing = measure_or_explain(spec)
    assert missing.status == "skipped"
    assert "NSYS=/path/to/nsys" in missing.reason
    on_cpu = measure_or_explain(make_spec(instrument="nsys"))
    assert on_cpu.status == "skipped"
    assert "NVIDIA GPU" in on_cpu.reason


def test_sampling_without_permission_is_said_before_anything_runs(monkeypatch, nsys, make_spec, tmp_path):
    nsys()
    monkeypatch.setattr("dpscope.runner.measurements.nsys.sampling_refused", lambda: "not permitted here")
    spec = make_spec(device="cuda", instrument="nsys", options={"cpu_sampling": True})
    with pytest.raises(UserError, match="not permitted here"):
        measure(spec, no_progress, tmp_path / "files" / "row")


# The program that runs under nsys


@pytest.fixture
def cuda(monkeypatch):
    """A diary of what a CUDA build of torch would have been told."""
    diary = []
    monkeypatch.setattr(torch._C, "_nvtx", object(), raising=False)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: diary.append(f"+{name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: diary.append("-"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: diary.append("synchronize"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: diary.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: diary.append("stop"))
    return diary


def test_captured_steps_lie_between_start_and_stop_each_a_range_around_its_phases(make_spec, cuda):
    ranged_step.run_captured_steps(make_spec(instrument="nsys", warmup=3, options={"captured_steps": 2}))
    step = ["+step", "+forward", "-", "+backward", "-", "+optimizer", "-", "-"]
    assert cuda == ["synchronize", "start", *step, *step, "synchronize", "stop"]  # and the warm-up has no ranges


def test_recording_by_hand_trains_until_it_is_ended(make_spec, cuda, monkeypatch, capsys):
    def train_step(self, batch):
        if len(cuda) > 100:
            raise KeyboardInterrupt

    monkeypatch.setattr("dpscope.trainers.base.TrainerBase.train_step", train_step)
    spec = json.dumps(make_spec(instrument="nsys").to_dict())
    monkeypatch.setattr(sys, "argv", ["ranged_step", spec, ranged_step.KEEP_GOING])
    assert ranged_step.main() == 0
    said = capsys.readouterr().out
    assert "training: record when you like" in said
    assert said.endswith('dpscope-outcome: {"status": "ok", "reason": null}\n')
    assert cuda.count("+step") > 10


def test_how_the_program_ended_is_one_line(make_spec, cuda, monkeypatch, capsys):
    spec = make_spec(instrument="nsys", options={"captured_steps": 4})
    monkeypatch.setattr(sys, "argv", program(spec)[2:])
    assert ranged_step.main() == 0
    assert capsys.readouterr().out == 'dpscope-outcome: {"status": "ok", "reason": null}\n'
    assert cuda.count("+step") == 4
