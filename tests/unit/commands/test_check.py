"""`dpscope check`: what it prints, what it writes, and how it exits."""

from __future__ import annotations

import io
import json
import re
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from dpscope.cli import main
from dpscope.commands import check as check_command
from dpscope.vocabulary.methods import methods
from tests.forked import run_forked
from tests.unit.exactness import planted_faults

SMALL = ["--num-layers", "1", "--hidden-dim", "16", "--num-heads", "2", "--vocab-size", "50", "--max-seq-len", "32"]


def run(*arguments: str):
    return CliRunner().invoke(main, ["check", "--device", "cpu", *map(str, arguments)])


@pytest.fixture(scope="module")
def small():
    return run(*SMALL, "--seq-len", "12")


def test_every_private_method_is_exact_on_the_transformer(small):
    assert small.exit_code == 0, small.output
    lines = small.output.splitlines()
    for method in ("flat", "ghost", "flash"):
        row = next(line for line in lines if line.startswith(f"{method} "))
        assert row.split()[1] == "exact" and len(row.split()) == 6
    assert "flat, ghost, flash: exact to 1e-05 in every parameter." in lines
    assert lines[-1] == "flat, ghost, flash: neighbours, noise, accounting held."


def test_neighbours_are_left_out_when_asked_and_then_the_verdict_on_exactness_comes_last():
    result = run(*SMALL, "--seq-len", "12", "--methods", "flash", "--no-neighbours")
    assert result.output.splitlines()[-1] == "flash: exact to 1e-05 in every parameter."
    assert "neighbours" not in result.output


def test_batch_sizes_of_ones_own_are_tried():
    usual, own = (run(*SMALL, "--seq-len", "4", "--methods", "flash", *sizes) for sizes in ((), ("--sizes", "7")))
    trials = [re.search(r"held in (\d+) trials", result.output)[1] for result in (usual, own)]
    assert int(trials[0]) > int(trials[1]) > 0
    assert run(*SMALL, "--sizes", "0").exit_code == 2


def test_the_first_lines_say_what_was_checked_and_at_which_clip_norms(small):
    first, second = small.stdout.splitlines()[:2]  # a slow machine says on stderr what it is checking
    assert first.startswith("tiny, sequence 12, batch 4, fp32: 21 of 21 parameters train; per-sample norms ")
    assert [part.split(" clipped)")[0] for part in second.split("(")[1:]] == ["0", "2", "4"]


def test_a_clip_norm_of_ones_own_is_the_middle_one():
    result = run(*SMALL, "--seq-len", "12", "--methods", "flash", "--max-grad-norm", "0.125", "--no-neighbours")
    assert result.exit_code == 0, result.output
    assert "0.125 (4 clipped)" in result.output


def test_paths_are_counted_and_shown_one_by_one_when_asked_for():
    options = ("--model", "cnn", "--image-size", "8", "--methods", "flash", "--no-neighbours")
    assert "Paths of flash: 3 kept" in run(*options).output
    shown = " ".join(run(*options, "--paths").output.split())
    assert "rank-1" in shown and "one position a sample" in shown
    assert "measured" not in shown
    measured = " ".join(run(*options, "--time-paths").output.split())
    assert "measured" in measured and " µs," in measured


def test_everything_is_written_to_a_file_when_asked_for(tmp_path):
    file = tmp_path / "check.json"
    result = run(
        *SMALL, "--seq-len", "12", "--methods", "flash,ghost", "--dtype", "fp64", "--no-neighbours", "--json", file
    )
    assert result.exit_code == 1, result.output  # ghost adds a constant to norms, which float64 shows
    assert "ghost: norms are larger by about 1.0e-06, each by the same" in " ".join(result.output.split())
    assert result.output.splitlines()[-1] == f"Written: {file}"
    found = json.loads(file.read_text())
    assert found["ok"] is False
    assert {m["method"]: m["verdict"] for m in found["methods"]} == {"flash": "exact", "ghost": "NOT EXACT"}
    assert set(found["methods"][0]["steps"][0]["parameter_errors"]) >= {"head.weight", "tokens.weight"}


def test_batch_norm_is_found_and_then_no_method_runs():
    result = run("--model", "cnn", "--norm", "batch", "--image-size", "8")
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "The workload: samples mix in 1 (BatchNorm2d)." in said
    assert "flat, ghost, flash skipped: cannot be trained privately" in said
    assert "use nn.GroupNorm(32, 64)" in said
    assert result.output.splitlines()[-1] == "No method ran on this workload: nothing is proved."


WORKLOAD = """
import torch
from dpscope import Workload

def make(batch_size):
    return Workload(
        model=lambda: torch.nn.Linear(5, 3),
        batch=lambda seed, device: torch.arange(5.0 * batch_size).view(batch_size, 5) / 10,
        loss=lambda model, batch: model(batch).square().sum(1),
    )

def broken(batch_size):
    def loss(model, batch):
        return model(batch).no_such_method()
    workload = make(batch_size)
    return Workload(model=workload.model, batch=workload.batch, loss=loss)

def of_six(batch_size):
    return make(6)

def undefined(batch_size):
    workload = make(batch_size)
    return Workload(model=workload.model, batch=workload.batch, loss=lambda m, b: workload.loss(m, b) * float("nan"))
"""


@pytest.fixture
def workload_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(WORKLOAD)
    return file


def test_ones_own_workload_is_checked(workload_file):
    result = run("--workload", f"{workload_file}:make", "--methods", "flash")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("mine.py:make, batch 4, fp32: 2 of 2 parameters train")


def test_an_error_in_ones_own_workload_is_shown_as_ones_own(workload_file):
    result = run("--workload", f"{workload_file}:broken", "--methods", "flash")
    assert result.exit_code == 2
    said = result.stderr
    assert said.startswith("Error: mine.py:broken failed:\nTraceback (most recent call last):\n")
    assert "no_such_method" in said and "src/dpscope" not in said


def test_a_batch_of_another_size_than_asked_for_is_refused(workload_file):
    result = run("--workload", f"{workload_file}:of_six", "--methods", "flash")
    assert result.exit_code == 2
    assert "the workload's batch has 6 samples where --batch-size says 4" in result.stderr
    of_six = run("--workload", f"{workload_file}:of_six", "--methods", "flash", "--batch-size", "6", "--no-neighbours")
    assert of_six.exit_code == 0


def test_a_loss_of_nan_is_called_a_loss_of_nan(workload_file):
    result = run("--workload", f"{workload_file}:undefined")
    assert result.exit_code == 2
    assert "the loss of every sample is nan: there is nothing to check" in result.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--methods", "flsh"], "unknown method 'flsh'"),
        (["--batch-size", "0"], "batch size must be a whole number of at least 1"),
        (["--tolerance", "0"], "0.0 is not in the range x>0"),
        (["--max-grad-norm", "-1"], "-1.0 is not in the range x>0"),
        (["--sizes", "4,0"], "--sizes must be a whole number of at least 1, not 0"),
        (["--sizes", "100000000"], "--sizes must be a whole number of at most 65536, not 100000000"),
        (["--tolerance", "nan"], "tolerance must be a number above 0, not nan"),
        (["--tolerance", "inf"], "tolerance must be a number above 0, not inf"),
        (["--tolerance", "5"], "tolerance must be a number above 0, from 1e-15 to 0.1, not 5.0"),
        (["--max-grad-norm", "nan"], "max grad norm must be a number above 0, not nan"),
        (["--max-grad-norm", "1e-300"], "max grad norm must be a number above 0, from 1e-12 to 1e+12, not 1e-300"),
        (["--batch-size", "1" + "0" * 23], "batch size must be a whole number of at most"),
        (["--dtype", "bf16"], "'bf16' is not one of 'fp32', 'fp64'"),
        (["--seq-len", "40"], "longer than the 32 positions"),
    ],
)
def test_wrong_usage_is_a_sentence_and_exit_code_2(options, sentence):
    result = run(*SMALL, *options)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path):
    result = run(*SMALL, "--seq-len", "8", "--methods", "flash", "--json", tmp_path / "nowhere" / "x.json")
    assert result.exit_code == 2 and "cannot write" in result.stderr


PLANTED = Path(planted_faults.__file__)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Somebody else's methods, as pip would install them."""
    site = tmp_path_factory.mktemp("site")
    metadata = site / "theirs-1.0.dist-info"
    metadata.mkdir()
    (site / "theirs.py").write_text(PLANTED.read_text())
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    names = {"right": "ByHand", "biasless": "ForgetsTheBias", "raising": "Raises"}
    lines = "\n".join(f"{name} = theirs:{trainer}" for name, trainer in names.items())
    (metadata / "entry_points.txt").write_text(f"[dpscope.methods]\n{lines}\n")
    (site / "little.py").write_text(
        textwrap.dedent("""
        from dpscope import Workload
        from theirs import Little, little_loss, make_batch
        def make(batch_size):
            return Workload(
                model=Little, loss=little_loss, batch=lambda seed, device: make_batch(seed, device, batch_size)
            )
        """)
    )
    return site


def test_an_installed_method_of_another_package_is_put_to_the_test(site, monkeypatch):
    monkeypatch.syspath_prepend(site)

    def check():
        methods.cache_clear()
        theirs = ["--workload", f"{site}/little.py:make", "--methods", "right,biasless,raising,flash"]
        main(["check", "--device", "cpu", *theirs])

    done = run_forked(check)
    assert done.returncode == 1, done.stderr
    said = " ".join(done.stdout.split())
    assert "biasless: does not move hidden.bias" in said
    assert "raising failed, in its own code:" in said and "KeyError: 'no such key'" in said
    assert "right, flash: exact to 1e-05 in every parameter; biasless: NOT EXACT; raising: failed." in said
    assert "right, noise: no noise is added: with and without it a step is the same." in said  # they forgot it
    assert said.endswith("right, biasless: BREACH (noise); flash: neighbours, noise, accounting held.")


@pytest.mark.parametrize("code", ["0", "'bye'", ""])
def test_a_workload_that_ends_python_is_no_verdict(tmp_path, code):
    file = tmp_path / "leaving.py"
    file.write_text(f"import sys\ndef make(batch_size):\n    sys.exit({code})\n")
    result = run("--workload", f"{file}:make")
    assert result.exit_code == 2
    assert "leaving.py:make ended Python (SystemExit" in result.stderr


def test_on_a_pipe_lines_say_what_is_being_done(monkeypatch, capsys):
    monkeypatch.setattr(check_command, "SECONDS_BETWEEN_LINES", 0.0)
    with check_command._progress(Console(file=io.StringIO())) as report:
        report("building the model")
        report("flash")
    assert capsys.readouterr().err == "checking: building the model\nchecking: flash\n"
