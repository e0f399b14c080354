"""`dpscope plan`: a verdict, a table, files, exit codes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from dpscope.cli import main
from dpscope.forecast.cards import CARDS, Card
from dpscope.forecast.fitting import largest_batch
from dpscope.forecast.plan import plan
from dpscope.forecast.step import forecast_step
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import make_config

STEP = ["--model", "tiny", "--num-layers", "1", "--seq-len", "32", "--methods", "flash", "--no-effects"]


def run(*arguments):
    return CliRunner().invoke(main, ["plan", *STEP, *arguments])


def test_a_plan_says_what_fits_how_long_it_takes_and_how_private_it_is(tmp_path):
    out = tmp_path / "plan.json"
    page = tmp_path / "plan.html"
    ended = run(
        *("--gpu", "h100-80gb", "--samples", "2000", "--epsilon", "8", "--epochs", "2", "--logical-batch", "64"),
        *("--price-per-hour", "2.5", "--accountant", "rdp", "--json", str(out), "--html", str(page)),
    )
    assert ended.exit_code == 0, ended.output
    (row,) = json.loads(out.read_text())["methods"]
    assert row["batch_size"] == 64
    assert row["steps"] == 64  # ⌈2000 / 64⌉ batches, twice
    assert row["privacy"]["epsilon"]["rdp"] <= 8
    assert row["price"] == pytest.approx(2.5 * row["hours"])
    assert "predicted, nothing was run" in ended.output
    assert "62 samples are expected in a batch, not 64" in ended.output
    assert str(page) in ended.output
    assert "<td>flash</td>" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "h300"], "unknown card 'h300'"),
        (["--gpu", "t4", "--samples", "100", "--epsilon", "0", "--epochs", "1"], "epsilon must be a number above 0"),
        (["--gpu", "t4", "--epsilon", "1"], "give --samples"),
        (["--gpu", "t4", "--samples", "100", "--hours", "1", "--epochs", "1"], "give one of them"),
        ([], "the card and the batch are both open"),
    ],
)
def test_wrong_usage_ends_in_a_sentence(arguments, says):
    ended = run(*arguments)
    assert ended.exit_code == 2
    assert says in ended.output
    assert "Traceback" not in ended.output


def small(gib):
    card = CARDS["t4"]
    return Card(**{**vars(card), "memory_gib": gib + card.context_bytes / 2**30})


def test_the_largest_batch_is_the_one_beyond_which_a_step_runs_out_of_memory():
    spec = RunSpec(
        workload=make_config("tiny", num_layers=1), method="standard", batch_size=1, seq_len=64, device="cuda"
    )
    card = small(0.25)
    fit = largest_batch(spec, card, 4096, lambda line: None)
    assert fit.points[fit.batch] <= fit.limit
    beyond = RunSpec(**{**vars(spec), "batch_size": int(fit.batch * 1.06)})
    assert forecast_step(beyond, card, detailed=False).reserved_bytes > fit.limit


def test_what_does_not_fit_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(CARDS, "t4", small(0.02))
    ended = run("--gpu", "t4")
    assert ended.exit_code == 1
    assert "does not fit. A batch of 1 peaks at" in ended.output


def test_the_smallest_card_is_found():
    found = plan(make_config("tiny", num_layers=1), methods=["standard"], batch_size=2, seq_len=16, effects=False)
    assert found["card"]["name"] == "t4"
    assert "smallest card" in found["remarks"][0]
