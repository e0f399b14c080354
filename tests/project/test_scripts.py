"""The scripts as a stranger meets them: help, wrong arguments, no Python, and ends that are told truly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests import ROOT

SCRIPTS = ROOT / "scripts"
SHELL = sorted(path.name for path in SCRIPTS.glob("run_*.sh"))
SMALL = {"VOCAB_SIZE": 50, "HIDDEN_DIM": 16, "NUM_LAYERS": 1, "NUM_HEADS": 2, "SEQ_LEN": 8, "NUM_ITER": 1}


@pytest.fixture
def run(tmp_path):
    """Run a script in another folder, whose name has a space."""
    folder = tmp_path / "a folder"
    folder.mkdir()

    def run(script, *arguments, scripts=SCRIPTS, **settings):
        environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        environment |= {name: str(value) for name, value in settings.items()}
        command = [scripts / script] if script.endswith(".sh") else [environment["PYTHON"], scripts / script]
        return subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            cwd=folder,
            timeout=240,
            check=False,
        )

    run.folder = folder
    return run


@pytest.mark.parametrize("script", SHELL)
def test_help_says_what_can_be_set_and_runs_nothing(run, script):
    done = run(script, "--help", PYTHON="no-such-python")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Set from outside: " in done.stdout
    assert f"scripts/{script}" in done.stdout
    assert "#" not in done.stdout.splitlines()[0]
    assert list(run.folder.iterdir()) == []


@pytest.mark.parametrize("script", SHELL)
def test_a_python_that_is_not_there_is_named_once(run, script):
    done = run(script, PYTHON="no-such-python")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: there is no Python at 'no-such-python': set PYTHON=/path/to/python\n"


@pytest.mark.parametrize("script", [*SHELL, "single_experiment.py", "profiling_script_ncu.py"])
def test_a_python_without_dpscope_is_told_how_to_install_it(run, script, tmp_path):
    python = tmp_path / "bare python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -E -S "$@"\n')
    python.chmod(0o755)
    done = run(script, PYTHON=python)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: dpscope is not installed in this Python. To install: ")
    assert str(SCRIPTS.parent) in done.stderr


@pytest.mark.parametrize(
    ("arguments", "settings", "says"),
    [
        (["--bogus"], {}, "unknown argument '--bogus'"),
        (["--guide", "more"], {}, "unknown argument '--guide'"),
        ([], {"BATCH_SIZES": "8 eight"}, "BATCH_SIZES must be whole numbers above 0, not 'eight'"),
        ([], {"SEQ_LENS": "0"}, "SEQ_LENS must be whole numbers above 0, not '0'"),
        ([], {"LIMIT": "1h"}, "LIMIT must be whole numbers above 0, not '1h'"),
        ([], {"TRAINERS": " "}, "TRAINERS is empty"),
        ([], {"TRAINERS": "standard dpsdg"}, "unknown method 'dpsdg': choose from standard"),
        ([], {"MODEL": "2b"}, "unknown model '2b'"),
        ([], {"DTYPE": "fp8"}, "unknown dtype 'fp8'"),
        ([], {"MODEL": "tiny", "SEQ_LENS": "64 1024"}, "sequence length 1024 is longer than the 512 positions"),
    ],
)
def test_what_the_ncu_script_does_not_know_is_refused_before_anything_runs(run, arguments, settings, says):
    done = run("run_profiling_ncu.sh", *arguments, **settings)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert list(run.folder.iterdir()) == []


def test_a_flag_that_no_experiment_knows_stops_the_experiments_at_once(run):
    done = run("run_all_experiments.sh", "--bogus", **SMALL)
    assert done.returncode == 2
    assert "unrecognized arguments: --bogus" in done.stderr
    assert done.stdout.count("===") == 1


def test_a_wrong_name_among_experiments_is_refused_before_the_first_runs(run):
    done = run("run_all_experiments.sh", EXPERIMENTS="vanilla gohst", **SMALL)
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown method 'gohst'" in done.stderr
    assert list(run.folder.iterdir()) == []


def test_figures_that_fail_are_a_failure_and_results_keep_the_name_that_was_asked_for(run, tmp_path):
    scripts = tmp_path / "scripts"
    shutil.copytree(SCRIPTS, scripts)
    (scripts / "visualize_memory_breakdown.py").write_text("import sys\nsys.exit('no figure today')\n")
    out = run.folder / "my results"
    done = run("run_all_experiments.sh", "--device", "cpu", scripts=scripts, EXPERIMENTS="vanilla", OUT=out, **SMALL)
    assert done.returncode == 1
    assert "+++ SUCCESS: vanilla" in done.stdout
    assert done.stdout.splitlines()[-1] == "Failed: figures"
    document = json.loads((out / "vanilla_result.json").read_text())
    assert document["experiment"] == "vanilla"


def test_the_self_test_takes_no_flags_of_a_profile(run):
    done = run("profiling_script.py", "--mode=test", "--stacks")
    assert done.returncode == 2
    assert "--mode=test takes no --stacks" in done.stderr


def test_a_signal_ends_script_and_program_and_nothing_more_is_begun(tmp_path, wait_until, alive):
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *door.py*) exit ;; esac\necho $$ >> "{tmp_path}/pids"\nexec sleep 600\n'
    )
    program.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(program), "OUT": str(tmp_path / "out"), **dict.fromkeys(SMALL, "1")}
    script = subprocess.Popen(
        [SCRIPTS / "run_all_experiments.sh"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = tmp_path / "pids"
    wait_until(lambda: pids.exists() and pids.read_text().strip(), "the first program runs")
    script.send_signal(signal.SIGTERM)
    _, told = script.communicate(timeout=30)
    assert script.returncode == 143
    assert f"Interrupted. What was finished is in {tmp_path}/out." in told
    (pid,) = map(int, pids.read_text().split())
    wait_until(lambda: not alive(pid), "the program is gone", seconds=10)
