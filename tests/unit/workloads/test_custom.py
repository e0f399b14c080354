"""The user's own workload: how it is found, what is said when it is wrong, and whose traceback is shown."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

import dpscope
from dpscope.cli import main
from dpscope.errors import UserError
from dpscope.reports.report import Report
from dpscope.runner.measure import measure_or_explain, own_traceback
from dpscope.runner.planning import explain, require_measurable
from dpscope.runner.spec import RunSpec
from dpscope.runner.sweep import Limits
from dpscope.vocabulary.statuses import FAILED, SKIPPED
from dpscope.workloads.configs import find_workload, workload_at
from dpscope.workloads.workload import build_workload
from tests import ROOT
from tests.forked import run_forked
from tests.rows_forked import rows_forked
from tests.unit.workloads import own_workloads

OWN = Path(__file__).with_name("own_workloads.py")


def spec_of(function, **changes):
    values = {"method": "standard", "batch_size": 2, "warmup": 0, "steps": 1}
    return RunSpec(workload=workload_at(f"{OWN}:{function}"), **{**values, **changes})


def build(function, *, batch_size=2, seq_len=None):
    return build_workload(workload_at(f"{OWN}:{function}"), batch_size=batch_size, seq_len=seq_len)


# -- finding it ------------------------------------------------------------------------------------------------------


def test_the_function_is_told_the_batch_size_and_the_length_it_asks_for():
    x, y = build("with_lengths", batch_size=5, seq_len=7).batch(0, "cpu")
    assert (x.shape, y.shape) == ((5, 7), (5,))


def test_a_file_is_loaded_anew_each_time_and_finds_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("from own_workloads import called_twice\n")
    (tmp_path / "mine.py").write_text(
        f"import sys; sys.path.insert(0, {str(OWN.parent)!r})\nimport neighbour\n"
        "def make(batch_size):\n    return neighbour.called_twice(batch_size)\n"
        "if __name__ == '__main__':\n    raise SystemExit('not when loaded')\n"
    )
    config = workload_at(f"{tmp_path / 'mine.py'}:make")
    first, second = (build_workload(config, batch_size=2, seq_len=None) for _ in range(2))
    assert first.model() is not second.model()
    assert config.name == "mine.py:make"


def test_a_module_of_a_package_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "somepackage" / "models"
    package.mkdir(parents=True)
    (tmp_path / "somepackage" / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "__init__.py").write_text("")
    (package / "mine.py").write_text("def make(): pass")
    monkeypatch.chdir(tmp_path)
    config = workload_at("somepackage.models.mine:make")
    assert (config.file, config.import_root) == (str(package / "mine.py"), tmp_path)
    assert config.name == "somepackage.models.mine:make"
    assert workload_at("somepackage.models:make").import_root == tmp_path


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("model.py", "--workload model.py: give --workload FILE.py:function"),
        (":make", "give --workload FILE.py:function"),
        ("model.py:", "give --workload FILE.py:function"),
        ("model.py:not a name", "give --workload FILE.py:function"),
        ("nowhere.py:make", "there is no file nowhere.py"),
        ("no.such.module:make", "no module 'no.such.module' in this folder or among the installed packages"),
        ("json.decoder.deeper:make", "no module 'json.decoder.deeper'"),
    ],
)
def test_a_place_where_nothing_is_gets_a_sentence(target, sentence):
    with pytest.raises(UserError, match=sentence):
        workload_at(target)


def test_a_function_object_is_found_again_by_its_file():
    config = find_workload(own_workloads.called_twice)
    assert (config.file, config.function, config.module) == (str(OWN), "called_twice", own_workloads.__name__)
    assert config.import_root == ROOT
    assert isinstance(build_workload(config, batch_size=2, seq_len=None), dpscope.Workload)


def test_a_function_that_no_child_could_find_gets_a_sentence():
    def inner():
        pass

    typed = {}
    exec(compile("def typed_in(): pass", "<stdin>", "exec"), typed)
    for lost in (inner, lambda: None, own_workloads.Twice().forward, print):
        with pytest.raises(UserError, match="cannot be found again by a child process: give a function at the top"):
            find_workload(lost)
    with pytest.raises(UserError, match="typed_in was typed in, not saved"):
        find_workload(typed["typed_in"])
    with pytest.raises(UserError, match=r"give the function that makes the workload, .*not a Workload"):
        find_workload(own_workloads.called_twice(2))


def test_names_of_presets_and_places_are_told_apart():
    assert find_workload("hf:gpt2").kind == "huggingface"
    assert find_workload("tiny").kind == "transformer"
    assert find_workload(f"{OWN}:called_twice").kind == "custom"


def test_file_names_are_safe_on_every_file_system():
    assert spec_of("called_twice").file_name.startswith("standard_own_workloads.py-called_twice_bs2_fp32-time-")


# -- what --resume may keep ------------------------------------------------------------------------------------------


def test_a_changed_file_is_another_spec(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def make(): pass")
    before = RunSpec(workload=workload_at(f"{file}:make"), method="standard", batch_size=2)
    assert RunSpec.from_dict(json.loads(json.dumps(before.to_dict()))) == before
    file.write_text("def make(): return 1")
    after = RunSpec(workload=workload_at(f"{file}:make"), method="standard", batch_size=2)
    assert before.digest != after.digest
    with pytest.raises(UserError, match=r"mine.py was changed while its rows were measured"):
        build_workload(before.workload, batch_size=2, seq_len=None)


# -- what is wrong with it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("no_such", r"own_workloads.py has no function 'no_such'; it has loss, called_twice"),
        ("NOT_A_FUNCTION", "is int 3, not a function that returns a dpscope.Workload"),
        ("returns_a_number", "must return a dpscope.Workload.*but it returned int 3"),
        ("returns_nothing", r"but it returned nothing \(is a `return` missing\?\)"),
        ("gives_a_model", r"Workload\(model=…\) must be a function that dpscope calls as model\(\), not Twice"),
        ("gives_tensors", r"Workload\(batch=…\) must be a function that dpscope calls as batch\(seed, device\), not t"),
        ("batch_without_arguments", r"must be a function that dpscope can call as batch\(seed, device\)"),
        ("asks_for_more", "asks for colour: a workload's function takes batch_size and seq_len, or neither"),
        ("with_lengths", "needs a sequence length: give --seq-len"),
    ],
)
def test_a_function_that_gives_no_workload_gets_a_sentence(function, sentence):
    with pytest.raises(UserError, match=sentence):
        build(function)


def test_a_length_that_the_function_does_not_take_gets_a_sentence():
    with pytest.raises(UserError, match="takes no seq_len: add it to the function's arguments, or leave out --seq-len"):
        build("called_twice", seq_len=8)


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("returns_a_number", "must return a dpscope.Workload"),
        ("batch_of_three", "the workload's batch has 3 samples where --batch-size says 2"),
        ("loss_that_fails", "own_workloads.py:loss_that_fails failed:\nTraceback"),
        ("scalar_loss", "must return one loss per sample"),
        ("exits", "ended Python"),
        ("batch_norm", "cannot be trained privately, .*1 is BatchNorm1d, use nn.GroupNorm"),
    ],
)
def test_what_shows_before_the_first_row_is_said_before_the_first_row(function, sentence):
    assert re.search(sentence, explain(spec_of(function, method="flash")))


def test_an_error_in_the_users_code_is_shown_as_theirs_with_nothing_of_ours_around_it():
    with pytest.raises(UserError) as refusal:
        require_measurable([spec_of("raises")])
    sentence, heading, *lines = str(refusal.value).splitlines()
    assert (sentence, heading) == ("own_workloads.py:raises failed:", "Traceback (most recent call last):")
    assert [line.split(", in ")[1] for line in lines if line.startswith("  File")] == ["raises", "_divide"]
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_a_fault_in_the_users_loss_is_found_before_any_row(tmp_path):
    with pytest.raises(UserError, match="loss_that_fails failed:"):
        dpscope.compare(f"{OWN}:loss_that_fails", methods=["flat", "flash"], device="cpu", out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_workload_that_never_takes_a_step_is_refused_in_the_time_of_a_row(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ndef make():\n    time.sleep(600)\n")
    spec = RunSpec(workload=workload_at(f"{tmp_path}/slow.py:make"), method="flat", batch_size=2)
    with pytest.raises(UserError, match="took no ordinary step within 1 s: raise --timeout"):
        require_measurable([spec], Limits(timeout=1))


@pytest.mark.parametrize("file", ["/etc/passwd", "/bin/sh"])
def test_a_file_that_is_not_python_is_refused(file):
    with pytest.raises(UserError, match=f"{file} is not a Python file"):
        workload_at(f"{file}:root")


def test_a_users_file_beside_the_package_whose_name_begins_like_it_is_still_theirs():
    beside = f"{Path(dpscope.__file__).parent}_experiments.py"
    config = replace(workload_at(f"{OWN}:raises"), file=beside)
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("1 / 0", beside, "exec"))
    frames = [line for line in own_traceback(caught.value, config).splitlines() if line.startswith("  File")]
    assert frames[-1] == f'  File "{beside}", line 1, in <module>'


def test_a_model_that_is_not_made_for_the_meta_device_is_left_to_its_rows():
    assert explain(spec_of("not_for_meta", method="flash")) is None


@pytest.mark.parametrize("method", ["standard", "flat", "flash"])
def test_a_row_that_fails_in_the_users_code_keeps_their_traceback_alone(method):
    result = measure_or_explain(spec_of("loss_that_fails", method=method))
    assert result.status == FAILED
    assert "mat1 and mat2 shapes cannot be multiplied" in result.reason
    frames = [line for line in result.details.splitlines() if line.startswith("  File")]
    assert frames[0].endswith("in _wrong_shapes")
    assert f'"{OWN}"' in frames[0]
    assert not any(str(Path(dpscope.__file__).parent) in frame for frame in frames)
    assert "mat1 and mat2" in result.details.splitlines()[-1]


def test_a_scalar_loss_gets_a_sentence():
    result = measure_or_explain(spec_of("scalar_loss"))
    assert result.status == SKIPPED
    assert "the workload's loss must return one loss per sample, shape (batch,)" in result.reason


def test_the_summary_shows_the_users_traceback_once():
    from dpscope.plain_text import render_plain
    from dpscope.reports.text import summary

    results = [measure_or_explain(spec_of("loss_that_fails", batch_size=size)) for size in (2, 2)]
    results[1] = replace(results[1], experiment="other")
    shown = render_plain(summary(Report.of(results)))
    assert shown.count("Traceback (most recent call last):") == 1
    assert "in _wrong_shapes" in " ".join(shown.split())  # wrapped where the path is long


# -- from Python -----------------------------------------------------------------------------------------------------

SCRIPT = f"""
import sys
sys.path.insert(0, {str(OWN.parent)!r})
import dpscope
from own_workloads import called_twice


def make(batch_size):
    return called_twice(batch_size)


if GUARD:
    small = dict(instruments=["time"], batch_size=[2], device="cpu", warmup=0, steps=1)
    comparison = dpscope.compare(make, methods=["standard"], out=OUT, **small)
    assert comparison.ok, comparison
    print(comparison)
"""


def run_script(tmp_path, guard):
    script = tmp_path / "compare_mine.py"
    script.write_text(SCRIPT.replace("GUARD", guard).replace("OUT", repr(str(tmp_path / "out"))))

    def run():
        with rows_forked():
            runpy.run_path(str(script), run_name="__main__")

    return run_forked(run)


def test_a_script_compares_its_own_function(tmp_path):
    done = run_script(tmp_path, "__name__ == '__main__'")
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("standard ")]
    assert row.rstrip().endswith("ok")
    assert len(list((tmp_path / "out" / "results").iterdir())) == 1


def test_a_script_that_compares_while_it_is_loaded_is_told_how_to_mend_it(tmp_path):
    done = run_script(tmp_path, "True")
    assert done.returncode == 1
    assert "put the call under `if __name__ == '__main__':`" in done.stderr
    assert not (tmp_path / "out").exists()


def test_specs_and_what_would_make_them_are_not_given_together():
    with pytest.raises(UserError, match="run specs say everything already: leave out methods"):
        dpscope.compare([spec_of("called_twice")], methods=["flash"], out="nowhere")


# -- from the command line -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "tiny", "--workload", "x.py:f"], "--model, --hf-config and --workload each say what is trained"),
        (["--hf-config", "c.json", "--workload", "x.py:f"], "give one of them"),
        (["--workload", "nowhere.py:make"], "there is no file nowhere.py"),
        (["--workload", f"{OWN}:called_twice", "--hidden-dim", "8"], "--hidden-dim: your workload decides its own"),
        (["--hf-config", "nowhere.json"], "--hf-config nowhere.json: No such file"),
        (["--lora", "r=8"], "needs r and target"),
        (["--model", "hf:nope"], "unknown model 'hf:nope'"),
        (["--lora", "r=8,target=q_proj"], "--lora target=q_proj: the model has no such module; it has tokens"),
        (["--workload", f"{OWN}:returns_nothing"], "is a `return` missing?"),
    ],
)
def test_the_command_line_refuses_with_a_sentence(tmp_path, monkeypatch, options, sentence):
    from click.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(main, ["compare", "--device", "cpu", "--methods", "standard", *options])
    assert outcome.exit_code == 2, outcome.output
    assert sentence in " ".join(outcome.stderr.split())
    assert outcome.stdout == ""
    assert list(tmp_path.iterdir()) == []  # and nothing was begun


def test_the_example_in_the_docs_runs(tmp_path):
    page = (ROOT / "docs" / "workloads.md").read_text()
    (tmp_path / "mine.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    (tmp_path / "mylibrary.py").write_text(
        "from torch import nn\ndef MyModel(): return nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 1000))\n"
    )
    workload = workload_at(f"{tmp_path / 'mine.py'}:make")
    spec = RunSpec(workload=workload, method="flash", batch_size=2, seq_len=8, warmup=0, steps=1)
    assert explain(spec) is None
    assert measure_or_explain(spec).ok
