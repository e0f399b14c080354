"""Checkpointed blocks and logical batches from the command line: in every instrument, and in `dpscope check`."""

from __future__ import annotations

import json
from unittest import mock

import pytest

from tests import rows_here

CHECKED = ["--num-layers", "2", "--hidden-dim", "16", "--num-heads", "2", "--vocab-size", "50", "--max-seq-len", "32"]


def documents(folder):
    """Result file's content by (method, instrument)."""
    found = [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*.json"))]
    return {(each["experiment"], each["spec"]["instrument"]): each for each in found}


def run(*arguments):
    """Without figures and pages, which take longer than these rows."""
    with mock.patch("dpscope.comparison.write_reports", lambda report, folder: []):
        return rows_here.run(*arguments)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory, tiny_flags):
    folder = tmp_path_factory.mktemp("settings")
    flags = ["--batch-size", "2", "--accumulate", "3", "--checkpoint-blocks", "--instruments", "time,memory,trace,ncu"]
    done = run("compare", *tiny_flags, *flags, "--methods", "standard,ghost,flash", "--out", folder)
    return done, documents(folder)


def test_every_instrument_measures_such_rows_and_what_cannot_be_trained_so_is_skipped(sweep):
    done, found = sweep
    assert done.exit_code == 1, done.output
    for (method, instrument), document in found.items():
        assert document["status"] == ("skipped" if method == "ghost" else "ok"), (method, instrument)
        assert (document["spec"]["accumulate"], document["spec"]["checkpoint_blocks"]) == (3, True)
    assert len(found) == 12
    assert "Opacus cannot train checkpointed blocks" in found["ghost", "time"]["reason"]


def test_a_step_is_the_logical_one(sweep):
    """Three forward passes a step: in its trace, in its snapshots and in its rate."""
    done, found = sweep
    snapshots = [each["name"] for each in found["flash", "memory"]["snapshots"]]
    assert [name for name in snapshots if name.endswith("after_forward")] == [
        "iter0_after_forward",
        "iter0_batch2_after_forward",
        "iter0_batch3_after_forward",
    ]
    assert {phase["phase"] for phase in found["flash", "trace"]["trace"]["phases"]} >= {"forward", "clip", "noise"}
    row = next(line for line in done.output.splitlines() if line.startswith("standard "))
    milliseconds = found["standard", "time"]["timing"]["median_ms"]
    assert f"{2 * 3 * 1e3 / milliseconds:,.0f}" in row.replace("?", "")
    assert "checkpointed blocks, 3 × the batch a step" in " ".join(done.output.split())


def test_checkpointed_blocks_keep_fewer_activations(tmp_path, tiny_flags):
    def activations(*more):
        folder = tmp_path / f"{len(more)}"
        sizes = ["--num-layers", "4", "--seq-len", "16", "--max-seq-len", "16", "--vocab-size", "8"]
        flags = ["--batch-size", "8", "--methods", "standard", "--out", folder]
        done = run("memory", *tiny_flags, *sizes, *flags, *more)
        assert done.exit_code == 0, done.output
        levels = documents(folder)["standard", "memory"]["timeline"]
        place = levels["components"].index("activations") + 1
        return max(point[place] for point in levels["points"])

    assert activations("--checkpoint-blocks") < activations() / 2


@pytest.mark.parametrize("more", [["--checkpoint-blocks"], ["--accumulate", "2"]])
def test_check_holds_such_steps_against_micro_batches_of_one(more):
    flags = ["--seq-len", "8", "--batch-size", "2", "--no-neighbours", "--device", "cpu"]
    done = rows_here.run("check", *CHECKED, *flags, *more)
    exact = "flat, ghost, flash" if "--accumulate" in more else "flat, ghost: did not run; flash"
    assert f"{exact}: exact to 1e-05 in every parameter." in done.output
    first = done.output.splitlines()[0]
    assert ("2 batches of 2 a step, batch 4" if "--accumulate" in more else "checkpointed blocks, batch 2") in first


@pytest.mark.parametrize(
    ("command", "more", "sentence"),
    [
        ("compare", ["--accumulate", "0"], "accumulate must be a whole number of at least 1, not 0"),
        ("compare", ["--accumulate", "1.5"], "'1.5' is not a valid integer"),
        ("compare", ["--model", "cnn", "--checkpoint-blocks"], "the model has no blocks to checkpoint"),
        ("check", ["--model", "cnn", "--checkpoint-blocks"], "the model has no blocks to checkpoint"),
        ("check", ["--accumulate", "-1"], "accumulate must be a whole number of at least 1, not -1"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_first_row(command, more, sentence):
    done = rows_here.run(command, "--device", "cpu", *more)
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_a_batch_that_cannot_be_divided_is_refused():
    import dpscope
    from dpscope.errors import UserError
    from dpscope.workloads.configs import make_config
    from dpscope.workloads.workload import build_workload

    workload = build_workload(make_config("cnn", image_size=8), batch_size=4, seq_len=None)
    with pytest.raises(UserError, match="a batch of 4 samples cannot be 3 batches of one size"):
        dpscope.check(workload, ["flash"], accumulate=3)
