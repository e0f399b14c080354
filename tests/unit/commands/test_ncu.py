"""`dpscope ncu` and `dpscope ncu-read` from the command line."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from dpscope.runner.spec import RunSpec
from tests import ROOT, rows_here

SCRIPTS = ROOT / "scripts"


def test_commands_are_printed_to_be_run_elsewhere(tiny_flags, no_ncu):
    done = rows_here.run("ncu", "--print-command", "--methods", "standard,ghost", "--kernel", "gemm", *tiny_flags)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        f"# {method} tiny bs8 seq8 fp32: {what}"
        for method in ("standard", "ghost")
        for what in ("one step as a whole", "its kernels one by one")
    ]
    step = shlex.split(lines[1])
    assert step[:2] == ["ncu", "--replay-mode=app-range"]
    spec = RunSpec.from_dict(json.loads(step[-1]))
    assert (spec.device, spec.instrument, spec.method) == ("cuda", "ncu", "standard")
    kernels = shlex.split(lines[3])
    assert "--kernel-name=regex:gemm" in kernels


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kernel", "("], "--kernel '(' is not a regular expression"),
        (["--top", "0"], "--top"),
        (["--budget", "0"], "--budget"),
    ],
)
def test_a_wrong_option_is_a_sentence(arguments, says):
    done = rows_here.run("ncu", *arguments)
    assert done.exit_code == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def estimated(tmp_path_factory, tiny_flags):
    """`dpscope ncu` on a CPU: how it ended, and its folder."""
    folder = tmp_path_factory.mktemp("ncu") / "out"
    return rows_here.run("ncu", "--methods", "standard", *tiny_flags, "--batch-size", "2", "--out", folder), folder


def test_without_a_gpu_the_bytes_are_an_estimate_and_say_so(estimated):
    done, folder = estimated
    assert done.exit_code == 0, done.output
    (path,) = (folder / "results").glob("*-ncu-*.json")
    seen = json.loads(path.read_text())["ncu"]
    assert seen["source"] == "estimate"
    assert "no GPU to count on" in seen["reason"]
    assert seen["command"] == []
    first, second = (line for line in done.stdout.splitlines() if line.startswith("["))
    assert re.fullmatch(
        r"\[1/2\] standard tiny bs2 seq8 fp32 time: [\d.]+ ms a step, peak [\d.]+ MiB( \([a-z ]+? .+ left\))?",
        first,
    )
    assert re.fullmatch(
        r"\[2/2\] standard tiny bs2 seq8 fp32 ncu: DRAM \(estimate\) [\d.]+ kB read, [\d.]+ kB written a step", second
    )


def test_the_estimate_is_more_than_the_optimizer_alone_moves(estimated):
    """AdamW reads parameters, gradients and two moments, and writes three of the four: 4 bytes each."""
    from dpscope.workloads.built_in import SimpleBigModel
    from dpscope.workloads.configs import make_config

    _, folder = estimated
    (path,) = (folder / "results").glob("*-ncu-*.json")
    document = json.loads(path.read_text())
    sizes = {name: value for name, value in document["spec"]["workload"].items() if name not in ("kind", "name")}
    parameters = sum(p.numel() for p in SimpleBigModel(make_config("tiny", **sizes)).parameters())
    traffic = document["ncu"]["traffic"]
    assert traffic["dram_read_bytes"] > 4 * 4 * parameters
    assert traffic["dram_write_bytes"] > 3 * 4 * parameters


@pytest.fixture
def folder_of_reports(ncu_captures, tmp_path, no_ncu):
    """As `run_profiling_ncu.sh` leaves them."""
    folder = tmp_path / "ncu_reports"
    folder.mkdir()
    shutil.copy(ncu_captures["range"], folder / "report_standard_bs8_seq256.ncu-rep")
    shutil.copy(ncu_captures["range"], folder / "report_dpsgd_bs8_seq256.ncu-rep")
    shutil.copy(ncu_captures["range"], folder / "report_dpsgd_bs16_seq256.ncu-rep")
    return folder


def test_reports_are_shown_next_to_standard_of_the_same_size(folder_of_reports):
    done = rows_here.run("ncu-read", folder_of_reports)
    assert done.exit_code == 0
    rows = {line.split()[0]: line.split() for line in done.output.splitlines() if line.startswith("report_")}
    assert rows["report_dpsgd_bs8_seq256"][1:5] == ["1.14", "GB", "1.01", "GB"]
    assert rows["report_dpsgd_bs8_seq256"][-1] == "1.00×"
    assert rows["report_dpsgd_bs16_seq256"][-1] == "—"


def test_reports_as_csv_hold_bytes_of_one_step(folder_of_reports):
    done = rows_here.run("ncu-read", folder_of_reports / "report_standard_bs8_seq256.ncu-rep", "--csv", "--steps", 2)
    (row,) = csv.DictReader(io.StringIO(done.output))
    assert row["report"] == "report_standard_bs8_seq256"
    assert float(row["dram_read_bytes"]) == 1_135_307_776 / 2
    assert float(row["tensor_flops"]) == 108_582_141_952 / 2


def test_a_report_of_kernels_is_added_up(ncu_captures, no_ncu):
    done = rows_here.run("ncu-read", ncu_captures["kernels"], "--csv")
    (row,) = csv.DictReader(io.StringIO(done.output))
    assert float(row["dram_read_bytes"]) == 1_623_529_728
    assert int(row["rows"]) == 298


def test_a_broken_report_is_named_and_the_rest_is_shown(folder_of_reports):
    (folder_of_reports / "report_cut_bs8_seq256.ncu-rep").write_bytes(b"NVR")
    done = rows_here.run("ncu-read", folder_of_reports)
    assert done.exit_code == 1
    assert "report_cut_bs8_seq256.ncu-rep" in done.stderr
    assert "report_standard_bs8_seq256" in done.stdout


def test_a_folder_without_reports_is_a_mistake(tmp_path):
    done = rows_here.run("ncu-read", tmp_path)
    assert done.exit_code == 2
    assert "no .ncu-rep files" in done.stderr


def run_script(tmp_path, **settings):
    """`scripts/run_profiling_ncu.sh` in a folder of its own."""
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": "ncu_reports", **settings}
    return subprocess.run(
        [SCRIPTS / "run_profiling_ncu.sh"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_the_script_makes_twelve_reports_and_a_table(tmp_path, fake_ncu, ncu_captures):
    from tests.fake_tools.ncu import raw_csv

    ncu = fake_ncu(
        reports={"range": str(ncu_captures["range"])},
        csv={"any": raw_csv([("range", {"dram__bytes_read.sum": 5e9, "dram__bytes_write.sum": 1e9}, None)])},
    )
    done = run_script(tmp_path, METRICS="gld_throughput")
    assert done.returncode == 0, done.stdout + done.stderr
    names = {
        f"report_{trainer}_bs{batch}_seq{length}.ncu-rep"
        for trainer in ("standard", "dpsgd", "dpsgd_ghost")
        for batch in (8, 16)
        for length in (256, 1024)
    }
    assert {path.name for path in (tmp_path / "ncu_reports").glob("*.ncu-rep")} == names
    assert done.stdout.count("+++ NCU SUCCESS") == 12
    assert "12 of 12 runs left a report in ncu_reports." in done.stdout
    assert sum(line.startswith("report_") for line in done.stdout.splitlines()) == 12
    assert "1.00 GB" in done.stdout  # 5 GB over five steps
    program = next(call for call in ncu.calls if "--trainer=dpsgd_ghost" in call)
    assert {"--mode=profile", "--batch_size=8", "--seq_len=256", "--model=1b", "--active_steps=5"} <= set(program)
    assert "--replay-mode=app-range" in program


@pytest.mark.slow
def test_one_failure_does_not_stop_the_rest(tmp_path, fake_ncu):
    """Without a GPU the real program fails under every ncu: each failure is said, and so is its cause."""
    fake_ncu(runs_program=True, says={"range": ""})
    done = run_script(tmp_path, TRAINERS="standard flash_clip", BATCH_SIZES="2", SEQ_LENS="8", MODEL="tiny")
    assert done.returncode == 1
    assert done.stdout.count("!!! NCU FAILED") == 2
    assert done.stderr.count("the program under ncu failed: --mode=profile needs a CUDA device") == 2
    assert "0 of 2 runs left a report" in done.stdout
    assert "Failed: report_flash_clip_bs2_seq8" in done.stdout
    log = (tmp_path / "ncu_reports" / "report_standard_bs2_seq8.log").read_text()
    assert "needs a CUDA device" in log


def test_the_script_without_ncu_says_so_at_once(tmp_path, no_ncu):
    done = run_script(tmp_path)
    assert done.returncode == 2
    assert "no `ncu` was found" in done.stderr
    assert not (tmp_path / "ncu_reports").exists()


def test_the_script_never_stops_at_the_first_error():
    assert "set -e" not in (SCRIPTS / "run_profiling_ncu.sh").read_text()
