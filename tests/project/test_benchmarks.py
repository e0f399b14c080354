"""The benchmarks that say how dpscope's figures stand up: they run on a CPU, too, at sizes that prove nothing else."""

from __future__ import annotations

import json
import random
import runpy
import statistics
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import assemble
from dpscope.workloads.configs import make_config
from tests import ROOT, rows_here


@pytest.fixture(autouse=True)
def no_reports(monkeypatch):
    """Figures and pages, which take longer than the rows, are nothing to these tests."""
    monkeypatch.setattr("dpscope.comparison.write_reports", lambda report, folder: [])


def load(name):
    return SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py")))


@pytest.fixture(scope="module")
def grid():
    return load("seeded_grid")


@pytest.fixture(scope="module")
def loop():
    return load("hand_written_loop")


def run_grid(grid, capsys, *arguments, launch=rows_here.launch_here):
    with mock.patch("dpscope.runner.sweep.launch", launch):
        code = grid.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out


def test_shapes_follow_from_the_seed_and_can_be_built(grid, capsys):
    shapes = {seed: run_grid(grid, capsys, "x", "--seed", seed, "--print", "--shapes", "40")[1] for seed in (1, 1, 2)}
    assert shapes[1] != shapes[2]
    assert shapes[1] == run_grid(grid, capsys, "x", "--seed", 1, "--print", "--shapes", "40")[1]
    families = {line.partition(",")[0] for line in shapes[1].splitlines()}
    assert families == {"1b", "hf:gpt2", "hf:llama", "hf:bert", "hf:vit"}
    chance = random.Random(3)
    for _ in range(200):
        shape = grid.draw_shape(chance, grid.LARGE)
        make_config(shape.family, **shape.sizes).resolve_seq_len(shape.seq_len)


def refusing(method, *, first):
    """Rows measured here, but the first so many of a method, which run out of memory."""
    left = [first]

    def launch(spec, store, **more):
        result = rows_here.launch_here(spec, store, **more)
        if spec.method == method and left[0]:
            left[0] -= 1
            result = replace(result, status="oom", reason="out of GPU memory", timing={}, memory={}, avg_time_ms=None)
            store.write(spec.file_name, result)
        return result

    return launch


def test_the_grid_draws_again_what_does_not_fit_prints_its_table_and_keeps_its_figures(grid, capsys, tmp_path):
    flags = ("--seed", 5, "--small", "--shapes", 2, "--steps", 2, "--warmup", 0)
    code, said = run_grid(grid, capsys, tmp_path, *flags, launch=refusing("standard", first=1))
    assert code == 0, said
    kept = json.loads((tmp_path / "seed-5.json").read_text())
    assert len(kept["drawn_again"]) == 1
    assert kept["drawn_again"][0].endswith("standard: out of GPU memory")
    assert f"Drawn again: {kept['drawn_again'][0]}" in said
    ratios = [shape["time_ratio"] for shape in kept["shapes"]]
    assert len(ratios) == 2 and kept["seed"] == 5
    assert f"time ×: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}" in said
    assert "Seed 5, fp32." in said and "peak ×: median" in said and "p10 to p90 of standard" in said
    for shape in kept["shapes"]:
        assert said.count(f"| {shape['shape']} |") == 2  # when it is measured, and in the table
        low, middle, high = (shape[f"standard_time_{name}_ms"] for name in ("p10", "median", "p90"))
        assert 0 < low <= middle <= high
        assert shape["flash_samples_per_second"] > 0
    assert len(list(tmp_path.glob("5-*/results/*.json"))) == 6


def test_flash_clipping_without_figures_is_no_success(grid, capsys, tmp_path):
    flags = ("--seed", 5, "--small", "--shapes", 1, "--steps", 1, "--warmup", 0)
    code, said = run_grid(grid, capsys, tmp_path, *flags, launch=refusing("flash", first=1))
    assert code == 1
    assert "No figures of flash: " in said and "out of GPU memory" in said


SPECS = {
    "decoder": {"checkpoint_blocks": True, "accumulate": 2},
    "gpt2": {"checkpoint_blocks": True},
    "vit": {"accumulate": 2},
}
MODELS = {
    "decoder": make_config("tiny", num_layers=2, hidden_dim=16, num_heads=2, vocab_size=40, max_seq_len=8),
    "gpt2": make_config("hf:gpt2-tiny", vocab_size=40),
    "vit": make_config("hf:vit-tiny"),
}


@pytest.mark.parametrize("method", ["standard", "flash"])
@pytest.mark.parametrize("name", SPECS)
def test_the_hand_written_loop_trains_as_the_row_does(loop, monkeypatch, name, method):
    """Without noise one step of either moves the parameters by the same."""
    values = {"batch_size": 2, "seq_len": None if name == "vit" else 8, "noise_multiplier": 0.0, "optimizer": "sgd"}
    spec = RunSpec(workload=MODELS[name], method=method, learning_rate=1e3, **values, **SPECS[name])
    model, batches = loop.build(spec)
    monkeypatch.setitem(loop.step_of.__globals__, "build", lambda spec: (model, batches))
    loop.step_of(spec)()

    trainer, trained_on = assemble(spec)
    trainer.train_step(*trained_on)
    for (parameter, by_hand), row in zip(model.named_parameters(), trainer.plain_model.parameters(), strict=True):
        torch.testing.assert_close(by_hand, row, rtol=1e-4, atol=1e-4, msg=lambda text: f"{parameter}: {text}")  # noqa: B023


def test_the_loop_measures_a_shape_and_a_sweep(loop, capsys, tmp_path, tiny_flags):
    sizes = ["--num-layers", "1", "--hidden-dim", "16", "--num-heads", "2", "--vocab-size", "50", "--model", "tiny"]
    flags = [*sizes, "--batch-size", "2", "--seq-len", "8", "--steps", "2", "--warmup", "1", "--device", "cpu"]
    kept = tmp_path / "by-hand.json"
    assert loop.main([*flags, "--dtype", "fp32", "--accumulate", "2", "--json", str(kept)]) == 0
    assert "flash takes " in capsys.readouterr().out
    assert [record["method"] for record in json.loads(kept.read_text())] == ["standard", "flash"]

    done = rows_here.run(
        "compare", *tiny_flags, "--batch-size", "2", "--instruments", "time", "--out", tmp_path / "out"
    )
    assert done.exit_code == 0
    code = loop.main([str(tmp_path / "out")])
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all("dpscope/by hand: time" in line for line in said)
    assert code == (0 if all(line.endswith(": agrees") for line in said) else 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nowhere holds no row of time of standard or flash"),
        (["--methods", "flat"], "no loop was written by hand for 'flat'"),
        (["--model", "2b"], "unknown model '2b'"),
        (["--model", "tiny", "--dtype", "fp32", "--param-dtype", "bf16"], "add --dtype bf16"),
    ],
)
def test_what_the_loop_cannot_do_is_a_sentence(loop, capsys, arguments, sentence):
    with pytest.raises(SystemExit, match="2"):
        loop.main(arguments)
    assert sentence in capsys.readouterr().err


def test_the_benchmark_of_checkpointed_blocks_shows_held_and_recomputed_ones(capsys):
    sizes = ["--layers", "2", "--width", "32", "--length", "8", "--batch", "4", "--steps", "1", "--device", "cpu"]
    load("checkpointed").main([*sizes, "--heads", "2", "--vocabulary", "16", "--dtype", "fp32"])
    rows = {line[:14].strip(): line.split() for line in capsys.readouterr().out.splitlines()[2:]}
    assert set(rows) == {"standard", "flash", "lean"}
    assert rows["lean"][-2:] == ["2", "recomputed"]


@pytest.fixture
def rivals(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return load("rivals")


def run_job(rivals, job, folder, seconds):
    turn = rivals.Turn(threading.Event(), threading.Event(), SimpleNamespace(value=time.time() + seconds))
    turn.come.set()
    rivals.Measuring(job, folder, tiny=True).run(turn)
    assert turn.ready.is_set()


def test_cells_are_measured_in_pairs_and_a_refused_one_has_its_reason(rivals, tmp_path):
    run_job(rivals, rivals.Job("gpt2", ("standard", "flash", "ghost"), ("flash",)), tmp_path, seconds=60)
    row = rivals.gathered(tmp_path, "x")["rows"]["gpt2"]["cells"]
    assert row["standard"]["ms"] > 0 and "time_ratio" not in row["standard"]
    assert row["flash"]["least_ratio"] <= row["flash"]["time_ratio"] <= row["flash"]["most_ratio"]
    assert row["ghost"]["status"] == "refused" and "tying" in row["ghost"]["reason"]
    assert row["flat"]["status"] == "not measured"


def test_a_spent_budget_skips_cells_and_says_so(rivals, tmp_path):
    run_job(rivals, rivals.Job("t5", ("standard", "flash")), tmp_path, seconds=-1)
    row = rivals.gathered(tmp_path, "x", rivals.HEADLINE)["rows"]["t5"]["cells"]
    assert row["flash"] == {"status": "not measured", "reason": "the time budget was spent"}


@pytest.mark.slow
def test_jobs_prepare_at_the_same_time_and_are_measured_in_turn(rivals, tmp_path):
    processes = rivals.Processes(tmp_path, tiny=True, command="x")
    jobs = rivals.whole(("decoder", "vit"), "functorch")
    processes.in_turn(jobs, time.time() + 100, time.time() + 120)
    found = json.loads((tmp_path / "engines.json").read_text())["rows"]
    assert [found[row]["cells"]["functorch"]["status"] for row in ("decoder", "vit")] == ["ok", "ok"]


def test_the_readmes_table_has_eager_and_graphed_cells_of_every_model(rivals, tmp_path):
    rows = rivals.gathered(tmp_path, "x", rivals.HEADLINE)["rows"]
    assert list(rows) == list(rivals.ROWS)
    assert {tuple(row["cells"]) for row in rows.values()} == {
        ("standard", "flat", "ghost", "flash", "standard graphed", "flash graphed")
    }


@pytest.mark.slow
def test_the_trainer_is_measured_beside_a_plain_loop(rivals, tmp_path):
    rivals.private_trainer.measure(tmp_path, tiny=True, seconds=1)
    found = json.loads((tmp_path / "trainer.json").read_text())["rows"]
    assert [each["logical"] for each in found] == [8, 32]
    assert all(each["trainer_ms"] > 0 and len(each["pairs"]) == 4 for each in found)
