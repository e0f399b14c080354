"""What a page says it cannot show: why, and what to type."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from dpscope.commands.memory import command as memory
from dpscope.commands.options import workload_from
from dpscope.commands.sweeping import specs_from
from dpscope.reports.page.missing import SHOWS, find_missing
from dpscope.reports.tables import compare_results
from dpscope.results.store import Skipped
from dpscope.workloads.configs import make_config
from tests.unit.reports.traffic_results import results_for


def gaps_of(*results):
    return {gap.what: gap for gap in find_missing(compare_results(results), ()).gaps}


def test_every_instrument_that_did_not_look_is_named_with_its_command(make_result):
    gaps = gaps_of(make_result(), make_result(method="flat"))
    assert list(gaps) == [text for name, text in SHOWS.items() if name != "time"]
    assert gaps[SHOWS["trace"]].command.startswith("dpscope trace --model tiny ")
    assert gaps[SHOWS["ncu"]].command.endswith(" --out DIR --resume")


def test_the_command_measures_the_same_specs(make_result):
    """Its options, read by the real command line, give the rows' own spec: only then do figures join."""
    result = make_result(method="flat", dtype="bf16", warmup=1, steps=4, noise_multiplier=0.5, seed=3)
    words = shlex.split(gaps_of(result)[SHOWS["memory"]].command)[2:]
    options = dict(memory.make_context("memory", words).params)
    specs = specs_from({name: value for name, value in options.items() if name != "rule"}, instruments=["memory"])
    assert [{**spec.to_dict(), "instrument": "time"} for spec in specs] == [result.spec]


def test_a_gap_at_some_sizes_names_them(make_result):
    gaps = gaps_of(make_result(), make_result(instrument="memory"), make_result(batch_size=4))
    assert gaps[SHOWS["memory"]].where == "batch 4, sequence 8"
    assert "--batch-size 4 " in gaps[SHOWS["memory"]].command


def test_what_was_measured_is_no_gap():
    gaps = gaps_of(*results_for("standard", "flat"))
    assert SHOWS["ncu"] not in gaps and SHOWS["time"] not in gaps


def test_an_instrument_that_failed_is_a_failure_and_not_a_gap(make_result):
    rows = compare_results([make_result(), make_result(instrument="memory", status="failed", reason="no tracker")])
    missing = find_missing(rows, ())
    assert missing.failed == [("standard", "batch 2, sequence 8", "failed", "no tracker")]
    assert SHOWS["memory"] not in [gap.what for gap in missing.gaps]


def test_files_left_out_are_named_with_the_reason():
    missing = find_missing([], [Skipped(Path("results/cut.json"), "not complete JSON")])
    assert missing.skipped == [("cut.json", "not complete JSON")]


@pytest.mark.parametrize("model", ["small", "cnn", "resnet18", "hf:vit"])
def test_the_command_names_every_built_in_model_with_its_sizes(make_result, model):
    config = make_config(model, num_classes=7) if model in ("cnn", "resnet18") else make_config(model)
    result = make_result(workload=config, seq_len=None)
    words = shlex.split(gaps_of(result)[SHOWS["memory"]].command)[2:]
    assert workload_from(dict(memory.make_context("memory", words).params)) == config


@pytest.mark.parametrize(
    ("workload", "flags"),
    [
        ({"kind": "custom", "name": "mine", "file": "/a b/m.py", "function": "f"}, "--workload '/a b/m.py:f'"),
        ({"kind": "huggingface", "name": "hf:gpt2", "settings": {}}, "--model hf:gpt2"),
        ({"kind": "huggingface", "name": "of-a-file", "settings": {}}, "--hf-config FILE"),
        ({"kind": "x", "name": "$(rm -rf ~)"}, "--hf-config FILE"),
    ],
)
def test_a_workload_that_is_no_preset_is_named_as_far_as_it_can_be(workload, flags):
    gaps = gaps_of(*results_for("standard", workload=workload))
    assert f"dpscope memory {flags} " in gaps[SHOWS["memory"]].command
