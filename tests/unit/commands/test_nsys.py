"""`dpscope nsys` on a machine without a GPU: what it prints, what it reads, and what it says that it cannot do."""

from __future__ import annotations

import json
import shlex

import pytest
from click.testing import CliRunner

from dpscope.cli import main
from tests import DATA
from tests.fake_tools import nsys as fake_nsys
from tests.fake_tools.nsys_exports import a_step

REAL = DATA / "nsys_step.sqlite"


@pytest.fixture
def dpscope(monkeypatch, tmp_path):
    """Run the command; nsys is nowhere unless a test installs one."""
    monkeypatch.setattr("dpscope.instruments.processes.ROOT", tmp_path / "root")
    monkeypatch.setenv("NSYS", str(tmp_path / "no-nsys"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        return CliRunner().invoke(main, ["nsys", *map(str, arguments)])

    return run


def test_the_printed_command_is_the_one_that_would_run_with_few_variables(dpscope, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "s3cr3t")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    shown = dpscope(
        "--methods", "flat,ghost", "--dtype", "tf32", "--batch-size", "2", "--print-command", "--out", "here"
    )
    assert shown.exit_code == 0, shown.output
    flat, ghost = (shlex.split(line) for line in shown.stdout.splitlines())
    assert flat[:2] == ["env", "-i"]
    assert "CUDA_VISIBLE_DEVICES=3" in flat
    assert not any("s3cr3t" in part for part in flat)
    assert flat[flat.index("profile") - 1] == "nsys"
    assert f"--output={tmp_path / 'here' / 'flat_tiny_bs2_seq256_tf32'}" in flat
    assert [json.loads(parts[-1])["method"] for parts in (flat, ghost)] == ["flat", "ghost"]
    assert json.loads(flat[-1])["device"] == "cuda"
    assert not (tmp_path / "here").exists()
    assert "No nsys on this machine" in shown.stderr


def test_the_printed_command_names_this_machines_nsys_and_its_options(dpscope, monkeypatch, tmp_path):
    installed = fake_nsys.install(tmp_path / "old", help_text=fake_nsys.OLD_HELP)
    monkeypatch.setenv("NSYS", str(installed))
    shown = dpscope("--methods", "flat", "--gpu-metrics", "--print-command")
    parts = shlex.split(shown.stdout)
    assert str(installed) in parts
    assert "--gpu-metrics-device=all" in parts
    assert "--stop-on-range-end=true" in parts


def test_the_recipe_has_three_commands_of_this_workload_and_the_cautions(dpscope):
    shown = dpscope("--methods", "ghost", "--batch-size", "2", "--seq-len", "64", "--launch").stdout
    commands = [line for line in shown.splitlines() if " launch " in line or line.startswith("nsys ")]
    launch, start, stop = (shlex.split(line) for line in commands)
    assert json.loads(launch[-2])["method"] == "ghost"
    assert launch[-1] == "--keep-going"
    session = "ghost-tiny-bs2-seq64-fp32"
    assert f"--session-new={session}" in launch
    assert start[:3] == ["nsys", "start", f"--session={session}"]
    assert stop == ["nsys", "stop", f"--session={session}"]
    for caution in ("below a minute", "you can write", "%h", "scheduler", "cpu-sampling", "environment"):
        assert caution in shown


def test_a_capture_that_exists_is_summarised_without_a_gpu(dpscope):
    shown = dpscope("--read", REAL)
    assert shown.exit_code == 0, shown.output
    assert "cudaLaunchKernel" in shown.stdout
    assert "unrolled_elementwise_kernel" in shown.stdout
    assert "298" in shown.stdout
    assert "launch-bound" in shown.stdout


def test_a_report_is_exported_before_it_is_read(dpscope, monkeypatch, tmp_path):
    export = a_step(tmp_path / "step.sqlite").write()
    monkeypatch.setenv("NSYS", str(fake_nsys.install(tmp_path / "nsight", export=export)))
    report = tmp_path / "mine.nsys-rep"
    report.write_text("a report")
    shown = dpscope("--read", report)
    assert shown.exit_code == 0, shown.output
    assert "backward" in shown.stdout
    assert (tmp_path / "mine.sqlite").exists()
    assert report.read_text() == "a report"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "is not there"),
        (lambda path: path.write_bytes(REAL.read_bytes()[:30_000]), "Export it again"),
        (lambda path: path.write_text("notes"), "cannot be read as SQLite"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_sentence(dpscope, tmp_path, make, says):
    path = tmp_path / "capture.sqlite"
    make(path)
    shown = dpscope("--read", path)
    assert shown.exit_code == 2
    assert shown.stderr.startswith("Error: ")
    assert says in shown.stderr


def test_a_report_without_an_nsys_to_export_it_is_a_sentence(dpscope, tmp_path):
    (tmp_path / "mine.nsys-rep").write_text("a report")
    shown = dpscope("--read", tmp_path / "mine.nsys-rep")
    assert shown.exit_code == 2
    assert "NSYS=/path/to/nsys" in shown.stderr


def test_without_a_gpu_it_is_a_sentence_and_nothing_is_written(dpscope, tmp_path):
    shown = dpscope("--device", "cpu", "--out", "here")
    assert shown.exit_code == 2
    assert "NVIDIA GPU" in shown.stderr
    assert not (tmp_path / "here").exists()


def test_no_steps_to_capture_is_wrong_usage(dpscope):
    assert dpscope("--captured-steps", "0").exit_code == 2
