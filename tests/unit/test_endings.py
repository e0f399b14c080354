"""Whatever ends a command early is one sentence on standard error and an exit code; a fault of ours is a traceback."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

import dpscope
from dpscope.cli import main
from dpscope.commands.sweeping import SweepProgress, _finished_rows_are_named
from dpscope.endings import Ended, Terminated, ending_of, ends_in_a_sentence
from dpscope.errors import UserError
from dpscope.results.store import ResultStore
from dpscope.vocabulary import statuses

GUIDE = [sys.executable, "-m", "dpscope", "ncu", "--guide"]  # prints much, imports little


@pytest.mark.parametrize("command", [GUIDE, [sys.executable, "-m", "dpscope", "--help"]], ids=["guide", "help"])
def test_output_that_cannot_be_written_is_a_sentence(command):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == "Error: cannot write to standard output: No space left on device\n"


def test_a_reader_who_has_read_enough_is_told_nothing():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(GUIDE, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_a_sweep_whose_reader_leaves_says_where_its_finished_rows_are(start, tmp_path, tiny_flags):
    rows = ["--methods", "standard", "--instruments", "time", "--batch-size", "1,2", "--out", tmp_path / "out dir"]
    reading, writing = os.pipe()
    os.close(reading)
    process = start("-m", "dpscope", "compare", *tiny_flags, *rows, stdout=writing)
    os.close(writing)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 141
    where = f"'{tmp_path}/out dir'"
    assert told == (
        f"1 of 2 rows are finished and in {where}: go on with the same command, --out {where} and --resume.\n"
    )
    assert len(list((tmp_path / "out dir" / "results").glob("*.json"))) == 1


@pytest.mark.parametrize(
    ("finished", "folder", "sentence"),
    [
        (1, "out", "1 of 2 rows are finished and in out: go on with the same command, --out out and --resume."),
        (1, "-x", "1 of 2 rows are finished and in ./-x: go on with the same command, --out ./-x and --resume."),
        (
            2,
            "out",
            "2 of 2 rows are finished and in out: dpscope report out shows them, and --out ELSEWHERE writes its files "
            "to another folder.",
        ),
    ],
)
def test_what_is_proposed_after_an_early_end_can_be_typed_and_helps(make_spec, finished, folder, sentence):
    progress = SweepProgress(Console(file=io.StringIO()), [make_spec(), make_spec()])
    progress.finished = finished
    with (
        pytest.raises(Ended) as caught,
        _finished_rows_are_named(progress, Path(folder), overwrite=False),
    ):
        raise OSError(28, "No space left on device", f"{folder}/summary.txt")
    assert caught.value.sentence == f"Error: No space left on device: {folder}/summary.txt\n{sentence}"


@pytest.mark.parametrize(
    ("error", "sentence", "code"),
    [
        (UserError("no such model"), "Error: no such model", 2),
        (KeyboardInterrupt(), "Interrupted.", 130),
        (Terminated(15), "Interrupted by SIGTERM.", 143),
        (OSError(28, "No space left on device", "out/row.json"), "Error: No space left on device: out/row.json", 2),
        (Ended("all said", 7), "all said", 7),
    ],
)
def test_each_ending_has_its_sentence_and_its_code(capsys, error, sentence, code):
    with pytest.raises(SystemExit) as left, ends_in_a_sentence():
        raise error
    assert left.value.code == code
    assert capsys.readouterr().err == f"{sentence}\n"


@pytest.mark.parametrize("fault", [ZeroDivisionError(), AttributeError("x"), ImportError("x", name="dpscope.gone")])
def test_a_fault_of_dpscope_keeps_its_traceback(fault):
    assert ending_of(fault) is None
    with pytest.raises(type(fault)), ends_in_a_sentence():
        raise fault


@pytest.fixture
def results(tmp_path, make_result):
    store = ResultStore(tmp_path / "sweep")
    store.create()
    store.write("row.json", make_result())
    return store.folder


MEASURING = ("compare", "memory", "trace", "ncu", "nsys")


@pytest.mark.parametrize(
    ("absent", "command"),
    [
        *(("torch", [name]) for name in (*MEASURING, "check", "selftest")),
        *(("jinja2", [name]) for name in (*MEASURING, "report")),
        *(("matplotlib", [name]) for name in ("compare", "report")),
        *(("pandas", ["report", option]) for option in ("--csv", "--latex")),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_without_a_package_a_command_says_what_to_install_and_begins_nothing(
    absent, command, results, monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, absent, None)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = CliRunner().invoke(main, [*command, *([str(results)] if command[0] == "report" else [])])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: not installed in this Python: {absent}. To install: ")
    assert done.stderr.endswith(f"pip install {absent}\n")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("option", ["out", "model", "workload", "hf-config", "methods", "dtype", "lora"])
@pytest.mark.parametrize("form", ["--{}=", "--{} "])
def test_an_empty_value_is_not_taken_for_a_default(option, form, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = form.format(option).split(" ")
    done = CliRunner().invoke(main, ["compare", "--device", "cpu", *given])
    assert done.exit_code == 2
    assert done.stderr == f"Error: --{option} is empty: give it a value, or leave it out\n"
    assert list(tmp_path.iterdir()) == []


def test_no_exit_code_is_a_bare_number():
    """Each has its name in `vocabulary/statuses.py`, and a meaning that no other shares."""
    bare = re.compile(r"(sys\.exit|SystemExit|os\._exit)\([^)]*\b\d")
    source = Path(dpscope.__file__).parent
    assert [str(path) for path in source.rglob("*.py") if bare.search(path.read_text("utf-8"))] == []
    codes = [value for name, value in vars(statuses).items() if name.isupper() and isinstance(value, int)]
    assert len(set(codes)) == len(codes) == 7
