"""`dpscope memory` from the command line to the files it leaves, and scripts/single_experiment.py beside it."""

from __future__ import annotations

import json
import runpy
import sys

import pytest
from click.testing import CliRunner

from dpscope.cli import main
from tests import ROOT, rows_here
from tests.rows_forked import rows_forked

EXPERIMENT = ROOT / "scripts" / "single_experiment.py"
SIZES = {"vocab-size": 50, "hidden-dim": 16, "num-layers": 1, "num-heads": 2, "seq-len": 8, "batch-size": 2}
SMALL = [text for name, value in {**SIZES, "num-iter": 2}.items() for text in (f"--{name}", value)]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory, tiny_flags):
    """`dpscope memory` of two methods, each in a process of its own: how it ended, and its folder."""
    folder = tmp_path_factory.mktemp("memory") / "out"
    rule = folder.parent / "mine.py"
    rule.write_text(
        "def logits(birth):\n    return 'logits' if birth.module == 'head' and birth.phase == 'forward' else None\n"
    )
    flags = [*tiny_flags, "--batch-size", "2", "--rule", f"{rule}:logits", "--out", str(folder)]
    with rows_forked():
        return CliRunner().invoke(main, ["memory", "--methods", "ghost,vanilla", *flags]), folder


def documents(folder):
    return [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*-memory-*.json"))]


def test_every_row_has_components_a_timeline_and_snapshots(sweep):
    done, folder = sweep
    assert done.exit_code == 0, done.output
    ghost, standard = documents(folder)
    for document in (ghost, standard):
        parts = document["memory"]["peak"]["components"]
        assert sum(parts.values()) == document["memory"]["peak_bytes"]
        assert document["timeline"]["points"]
        assert document["timing"] == {}
    assert standard["memory"]["peak"]["components"]["norm_samples"] == 0
    assert ghost["memory"]["peak"]["components"]["norm_samples"] > 0


def test_the_first_snapshot_is_the_model_alone(sweep):
    """In a process of its own: nothing is there but the parameters."""
    _, folder = sweep
    for document in documents(folder):
        first = document["snapshots"][0]
        assert first["name"] == "0_model_loaded"
        assert first["allocated_mb"] == document["breakdown"]["model_parameters_mb"]
        assert first["reserved_mb"] > first["allocated_mb"]


def test_a_rule_of_the_users_own_reaches_the_measuring_process(sweep):
    _, folder = sweep
    for document in documents(folder):
        assert "logits" in document["timeline"]["components"]
        place = document["timeline"]["components"].index("logits") + 1
        assert max(point[place] for point in document["timeline"]["points"]) == 2 * 8 * 50 * 4


def test_results_are_shown_again_without_measuring(sweep):
    _, folder = sweep
    report = rows_here.run("report", folder)
    assert report.exit_code == 0
    assert any(line.startswith("ghost ") for line in report.stdout.splitlines())


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("memory", "--memory-viz"), "--memory-viz records the CUDA allocator: leave it out on the CPU"),
        (("memory", "--rule", "nowhere.py:rule"), "there is no file nowhere.py"),
        (("memory", "--rule", "rule"), "expected FILE.py:function or package.module:function"),
        (("compare", "--instruments", "ruler"), "unknown instrument 'ruler': choose one of time, memory"),
        (("compare", "--instruments", "time,"), "has an empty part"),
    ],
)
def test_mistakes_are_met_with_a_sentence(command, sentence, tmp_path):
    done = rows_here.run(*command, "--device", "cpu", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_experiment_gives_the_file_of_old_with_times_and_components(tmp_path, monkeypatch, capsys):
    output = tmp_path / "ghost_result.json"
    flags = [*SMALL, "--warmup-iter", "1", "--device", "cpu", "--output", output]
    monkeypatch.setattr("dpscope.runner.sweep.launch", rows_here.launch_here)
    monkeypatch.setattr(sys, "argv", [str(EXPERIMENT), "--experiment", "ghost", *map(str, flags)])
    monkeypatch.syspath_prepend(EXPERIMENT.parent)  # as `python SCRIPT` would
    with pytest.raises(SystemExit) as outcome:
        runpy.run_path(str(EXPERIMENT), run_name="__main__")
    assert outcome.value.code == 0, capsys.readouterr().err
    document = json.loads(output.read_text())
    assert document["experiment"] == "ghost"
    assert document["config"]["hidden_dim"] == 16
    assert len(document["timing"]["step_ms"]) == 2
    assert document["avg_time_ms"] > 0
    assert document["peak_memory_mb"] == document["breakdown"]["peak_allocated_mb"] > 0
    assert {"model_parameters_mb", "optimizer_states_mb", "gradients_mb", "activation_hooks_mb", "norm_samples_mb",
            "temp_matrices_mb", "total_allocated_mb", "peak_allocated_mb"} <= set(document["breakdown"])  # fmt: skip
    assert {"name", "allocated_mb", "reserved_mb", "timestamp"} == set(document["snapshots"][0])
    report = rows_here.run("report", tmp_path)
    assert any(line.startswith("ghost ") for line in report.stdout.splitlines())
