"""`dpscope plan`: a verdict, a table, files, exit codes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import dpscope
from dpscope.cli import main
from dpscope.errors import UserError
from dpscope.forecast.accounting import epsilon_of
from dpscope.forecast.cards import CARDS, Card
from dpscope.forecast.fitting import largest_batch
from dpscope.forecast.plan import plan
from dpscope.forecast.probe import Probe
from dpscope.forecast.step import forecast_step
from dpscope.plain_text import as_json
from dpscope.reports.plan_text import describe_plan
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import make_config
from tests import ROOT
from tests.remembered_forecasts import forecast_once, remembered_forecasts  # noqa: F401

pytestmark = pytest.mark.usefixtures("remembered_forecasts")
SCHEMA = json.loads((ROOT / "docs" / "schemas" / "plan.json").read_text())
STEP = ["--model", "tiny", "--num-layers", "1", "--seq-len", "16", "--methods", "flash", "--no-effects"]


def require_schema(document):
    """Require what docs/schemas/plan.json says of a document as it is written."""
    pytest.importorskip("jsonschema").validate(json.loads(as_json(document)), SCHEMA)


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
    document = json.loads(out.read_text())
    require_schema(document)
    (row,) = document["methods"]
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
        (["--gpu", "t4", "--samples", "100", "--hours", "1"], "the noise is open"),
        (["--gpu", "t4", "--samples", "100", "--hours", "1", "--epsilon", "0"], "epsilon must be a number above 0"),
        (["--gpu", "t4", "--samples", "100", "--noise-multiplier", "1"], "how long to train is open"),
        (["--gpu", "t4", "--noise-multiplier", "1"], "give --samples"),
        (["--gpu", "t4", "--price-per-hour", "2"], "the price depends on how long to train"),
        (["--gpu", "t4", "--html", "-"], "give the name of a file"),
        (["--gpu", "t4", "--batch-size", "100000000"], "batch size must be a whole number of at most 1048576"),
        ([], "the card and the batch are both open"),
    ],
)
def test_wrong_usage_ends_in_a_sentence(arguments, says):
    ended = run(*arguments)
    assert ended.exit_code == 2
    assert says in ended.output
    assert "Traceback" not in ended.output
    assert "a step of" not in ended.output  # it is said before anything runs


def small(gib):
    card = CARDS["t4"]
    return Card(**{**vars(card), "memory_gib": gib + card.context_bytes / 2**30})


def test_the_largest_batch_is_the_one_beyond_which_a_step_runs_out_of_memory():
    spec = RunSpec(
        workload=make_config("tiny", num_layers=1), method="standard", batch_size=1, seq_len=64, device="cuda"
    )
    card = small(0.25)
    fit = largest_batch(spec, card, 4096, lambda line: None)
    assert fit.points[fit.batch].peak_bytes <= fit.limit
    beyond = RunSpec(**{**vars(spec), "batch_size": int(fit.batch * 1.06)})
    assert forecast_step(beyond, card, detailed=False).reserved_bytes > fit.limit


def test_a_plan_says_that_all_samples_are_in_every_step_and_tells_short_times_in_minutes():
    ended = run("--gpu", "t4", "--samples", "60", "--epsilon", "8", "--epochs", "2", "--accountant", "rdp")
    assert "The sampling rate is 1: each step takes all 60 samples." in ended.output
    assert "a draw may hold more" not in ended.output
    assert "; 0 s." in ended.output


def test_training_without_privacy_needs_no_epsilon_and_the_other_methods_do():
    length = {"samples": 100, "epochs": 2, "logical_batch": 50, "card": "t4", "seq_len": 16, "effects": False}
    (row,) = plan("tiny", methods=["standard"], price_per_hour=3.0, **length)["methods"]
    assert row["steps"] == 4
    assert row["price"] == pytest.approx(3 * row["hours"])
    with pytest.raises(UserError, match="the noise is open"):
        plan("tiny", methods=["standard", "flash"], **length)


def test_time_and_money_are_those_of_the_samples_that_are_drawn():
    """Of 100 samples in logical batches of 60, a Poisson draw takes 50: the loader rounds the rate to one in two."""
    wish = {"samples": 100, "epochs": 3, "logical_batch": 60, "card": "t4", "seq_len": 16, "effects": False}
    (row,) = plan("tiny", methods=["standard"], **wish)["methods"]
    assert row["steps"] == 6
    assert 3600 * row["hours"] == pytest.approx(300 / row["samples_per_second"])


def test_flags_that_take_one_value_here_are_not_said_to_take_several():
    several, one = (CliRunner().invoke(main, [name, "--help"]).output for name in ("compare", "plan"))
    assert "--compile none,default" in several
    assert "none,default" not in one
    assert "1,4" not in one


def test_a_page_can_be_read_on_a_narrow_screen(tmp_path):
    page = tmp_path / "plan.html"
    run("--gpu", "t4", "--html", str(page))
    assert 'name="viewport"' in page.read_text()
    assert "<div><table>" in page.read_text()  # which scrolls by itself


def test_training_with_the_noise_that_is_shown_spends_no_more_than_the_epsilon_that_is_shown():
    """A noise multiplier that was rounded down, as 0.47274 to 0.4727, spent more than was asked for."""
    wish = {"methods": ["flash"], "card": "t4", "seq_len": 16, "samples": 5000, "logical_batch": 100, "effects": False}
    for epsilon in (1.0, 3.0, 8.0):
        found = plan(make_config("tiny", num_layers=1), epsilon=epsilon, epochs=2, accountant="rdp", **wish)
        shown = next(line for line in describe_plan(found).splitlines() if line.startswith("flash  ")).split("  ")
        noise, _, spent = [cell for cell in shown if cell][6:9]
        private = found["methods"][0]["privacy"]
        taken = epsilon_of(float(noise), private["sample_rate"], private["steps"], private["delta"], "rdp")
        assert taken <= min(epsilon, float(spent))


def test_what_does_not_fit_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(CARDS, "t4", small(0.02))
    ended = run("--gpu", "t4")
    assert ended.exit_code == 1
    assert "does not fit. A batch of 1 takes" in ended.output


def test_a_given_batch_that_does_not_fit_says_what_it_takes_and_which_one_fits(monkeypatch):
    monkeypatch.setitem(CARDS, "t4", small(0.25))
    found = plan(make_config("tiny", num_layers=1), methods=["standard"], card="t4", batch_size=10**6, seq_len=16)
    (row,) = found["methods"]
    assert row["needs_batch"] == 10**6
    assert row["needs_bytes"] > found["card"]["limit_bytes"]
    assert f"The largest batch that fits is {row['largest_batch']}." in describe_plan(found)


def test_an_estimate_is_said_to_be_one():
    found = plan(make_config("tiny", num_layers=1), methods=["flash"], card="t4", seq_len=16, effects=False)
    assert "Estimates" not in describe_plan(found)
    found["methods"][0]["step"]["is_estimate"] = True
    assert "Estimates: rows go to experts by their values" in describe_plan(found)


def of_one_size(batch_size):
    return workload_with(lambda: nn.Linear(4, 4), 16)


def of_any_size(batch_size):
    return workload_with(lambda: nn.Linear(4, 4), batch_size)


def with_a_table(batch_size):
    return dpscope.Workload(
        model=lambda: nn.Linear(4, 4),
        batch=lambda seed, device: {"x": torch.randn(batch_size, 4), "table": torch.zeros(16, 4)},
        loss=lambda model, batch: (model(batch["x"]) @ batch["table"].T).sum(1),
    )


def test_a_workload_of_one_size_is_planned_at_others():
    """Its samples are repeated. A table beside them is not."""
    wish = {"methods": ["standard", "flash"], "card": "t4", "effects": False}
    fixed = plan(of_one_size, **wish)["methods"]
    assert fixed == plan(of_any_size, **wish)["methods"]
    assert [row["batch_size"] for row in fixed] == [256, 256]
    inputs = plan(with_a_table, **wish)["methods"][0]["step"]["components"]["inputs"]
    assert inputs == 4 * (256 * 4 + 16 * 4)


def test_steps_as_cuda_graphs_are_refused_in_a_sentence():
    ended = run("--gpu", "t4", "--cuda-graph")
    assert ended.exit_code == 2
    assert "leave out --cuda-graph" in ended.output


def test_the_smallest_card_is_found():
    found = plan(make_config("tiny", num_layers=1), methods=["standard"], batch_size=2, seq_len=16, effects=False)
    assert found["card"]["name"] == "t4"
    assert "smallest card" in found["remarks"][0]


def test_what_does_not_fit_and_what_would_change_are_in_the_document(monkeypatch):
    wish = {"methods": ["flash"], "seq_len": 16, "card": "t4", "batch_size": 2}
    config = make_config("tiny", num_layers=1)
    planned = plan(config, **wish)
    probed = plan(config, prober=measured_with(2**20), **wish)
    monkeypatch.setitem(CARDS, "t4", small(0.02))
    too_large = plan(config, **{**wish, "methods": ["standard"]})
    for document in (planned, too_large, probed):
        require_schema({"document": "dpscope.plan", "version": 1, **document})
    assert [effect["what"] for effect in planned["effects"]][:2] == ["twice the batch", "checkpointed blocks"]
    assert "does not fit" not in describe_plan(planned)
    first, *others = planned["effects"]
    beyond = {**planned, "effects": [first, first, {**first, "peak_bytes": 2**50}, *others]}
    assert describe_plan(beyond).count("twice the batch") == 2
    assert describe_plan(beyond).count(", which does not fit") == 1
    assert not too_large["fits"]


def test_what_does_not_fit_is_told_what_would_change_it_too(monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.setitem(CARDS, "t4", small(0.02))
    found = plan("hf:llama-tiny", methods=["flash"], seq_len=16, card="t4")
    effects = {effect["what"]: effect["peak_ratio"] for effect in found["effects"]}
    assert not found["fits"]
    assert "twice the batch" not in effects
    assert effects["LoRA of rank 16 on all linear layers"] < 1


def test_a_card_without_bf16_is_not_told_to_use_it_and_gains_nothing_by_it():
    config = make_config("tiny", num_layers=1)
    step = {"methods": ["standard"], "seq_len": 16, "batch_size": 2, "effects": True}
    old, new = (plan(config, card=name, **step) for name in ("t4", "a10"))
    assert "bf16" not in [effect["what"] for effect in old["effects"]]
    assert "bf16" in [effect["what"] for effect in new["effects"]]
    asked = plan(config, card="t4", settings={"dtype": "bf16"}, **{**step, "effects": False})
    assert "no tensor cores for bf16" in " ".join(asked["remarks"])
    assert CARDS["t4"].flops_of(torch.bfloat16, tf32=False) == ("fp32", CARDS["t4"].fp32_flops)
    assert CARDS["t4"].flops_of(torch.float16, tf32=False) == ("half", CARDS["t4"].half_flops)
    assert CARDS["a10"].flops_of(torch.bfloat16, tf32=True) == ("half", CARDS["a10"].half_flops)


class ReadsItself(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return 2 * y if y.sum() > 0 else y


def workload_with(model, batch_size):
    return dpscope.Workload(
        model=model,
        batch=lambda seed, device: torch.randn(batch_size, 4, device=device),
        loss=lambda model, batch: model(batch).sum(1),
    )


def reading_workload(batch_size):
    return workload_with(lambda: ReadsItself(4, 4), batch_size)


def unbuildable_workload(batch_size):
    def build():
        raise RuntimeError("no weights here")

    return workload_with(build, batch_size)


@pytest.mark.parametrize(
    ("workload", "says"), [(reading_workload, "reads the value of a tensor"), (unbuildable_workload, "no weights here")]
)
def test_a_model_that_cannot_be_followed_is_refused_in_a_sentence(workload, says):
    with pytest.raises(UserError, match=says):
        plan(workload, card="t4", methods=["standard", "flash"])


def measured_with(missed):
    """Probes of a GPU whose steps take more memory than predicted, and three times as long."""

    def probe(spec, batches, say):
        steps = [forecast_once(replace(spec, batch_size=size), CARDS["t4"]) for size in batches]
        return [
            Probe(size, step.peak_bytes + missed, 3 * step.gpu_seconds, 3 * step.gpu_seconds)
            for size, step in zip(batches, steps, strict=True)
        ]

    return probe


def test_a_probed_plan_has_the_batch_for_which_the_gpu_has_room(monkeypatch):
    monkeypatch.setitem(CARDS, "t4", small(0.15))
    wish = {"methods": ["standard"], "seq_len": 64, "card": "t4", "logical_batch": 4096, "effects": False}
    config = make_config("tiny", num_layers=1)
    predicted, probed = (
        plan(config, prober=prober, **wish)["methods"][0] for prober in (None, measured_with(32 * 2**20))
    )
    assert probed["largest_batch"] < 0.8 * predicted["largest_batch"]
    assert probed["step"]["peak_bytes"] <= small(0.15).usable_bytes
    assert sum(probed["step"]["components"].values()) == probed["step"]["peak_bytes"]
    step = forecast_step_of(config, probed["batch_size"], probed["accumulation"])
    assert probed["step"]["seconds"] == pytest.approx(3 * step.gpu_seconds)


def forecast_step_of(config, batch, passes):
    spec = RunSpec(workload=config, method="standard", batch_size=batch, accumulate=passes, seq_len=64, device="cuda")
    return forecast_step(spec, CARDS["t4"])


def test_a_logical_batch_of_several_passes_holds_the_sum_of_their_gradients():
    """As training by the plan does, whose batches are passes: without it, the peak was too low by all gradients."""
    wish = {"methods": ["standard", "flash"], "seq_len": 64, "card": "t4", "batch_size": 16, "effects": False}
    config = make_config("tiny", num_layers=1)
    one, several = (plan(config, logical_batch=size, **wish)["methods"] for size in (16, 96))
    weights = one[0]["step"]["components"]["model_parameters"]
    for alone, summed in zip(one, several, strict=True):
        assert (alone["accumulation"], summed["accumulation"]) == (1, 6)
        drawn = (
            weights if alone["method"] == "standard" else 0
        )  # a Poisson draw may take two passes where one is expected
        assert summed["step"]["peak_bytes"] - alone["step"]["peak_bytes"] == pytest.approx(drawn, abs=0.02 * weights)
        assert sum(alone["step"]["components"].values()) == alone["step"]["peak_bytes"]
        assert summed["logical_seconds"] < 6 * alone["logical_seconds"]  # one update
    assert several == plan(config, settings={"accumulate": 6}, **wish)["methods"]
    with pytest.raises(UserError, match="make a logical batch of 96, not 16"):
        plan(config, settings={"accumulate": 6}, logical_batch=16, **wish)


def test_passes_that_are_not_run_take_what_they_take_where_they_are(monkeypatch):
    spec = RunSpec(
        workload=make_config("tiny", num_layers=1),
        method="flash",
        batch_size=2,
        accumulate=4,
        seq_len=16,
        device="cuda",
    )
    found = forecast_step(spec, CARDS["t4"])
    monkeypatch.setattr("dpscope.forecast.step.MOST_PASSES", 4)
    run = forecast_step(spec, CARDS["t4"])
    assert found.peak_bytes == run.peak_bytes
    assert found.kernels == pytest.approx(run.kernels, abs=4)  # of constants, which the first two passes make
    assert found.seconds == pytest.approx(run.seconds, rel=1e-3)
    assert found.families.keys() == run.families.keys()


def test_a_compiled_step_is_said_to_be_predicted_as_an_eager_one():
    compiled = {"settings": {"compile": "default"}, "methods": ["standard"], "seq_len": 16, "effects": False}
    config = make_config("tiny", num_layers=1)
    assert "eager step" in " ".join(plan(config, card="h200", batch_size=2, **compiled)["remarks"])
    measured = plan(config, card="h200", batch_size=2, prober=measured_with(0), **compiled)
    assert "eager step" not in " ".join(measured["remarks"])


def test_probes_of_several_gpus_are_refused():
    with pytest.raises(UserError, match="--probe measures on one GPU"):
        plan("tiny", card="h200", prober=measured_with(0), settings={"gpus": 2})
