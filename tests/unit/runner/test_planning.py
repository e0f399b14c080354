"""The command line and Python plan one sweep alike: the same rows in the same order, each once."""

from __future__ import annotations

import click
import pytest

from dpscope import comparison
from dpscope.commands.sweeping import plan_from, sweep_arguments
from dpscope.errors import UserError
from dpscope.runner.planning import make_sweep, plan_sweep
from dpscope.workloads.configs import make_config

TINY = make_config("tiny")


def planned_by_command(*arguments, **asked):
    """The specs of a command line, as every measuring subcommand plans them."""
    found = []

    @click.command()
    @sweep_arguments
    def command(**options):
        found.extend(plan_from(options, **asked).specs)

    command.main(["--device", "cpu", *arguments], standalone_mode=False)
    return found


@pytest.mark.parametrize(
    ("flags", "asked"),
    [
        ((), {}),
        (("--methods", "ghost,vanilla,flat"), {"methods": ["ghost", "vanilla", "flat"]}),
        (("--methods", "flash,dpsgd,flat,standard"), {"methods": ["flash", "dpsgd", "flat", "standard"]}),
        (("--batch-size", "4,2", "--seq-len", "16,8"), {"batch_size": [4, 2], "seq_len": (16, 8)}),
        (("--compile", "default"), {"compile": "default"}),
        (("--compile", "none,max-autotune"), {"compile": ["none", "max-autotune"]}),
        (
            ("--dtype", "bf16", "--optimizer", "sgd", "--learning-rate", "0.5", "--noise-multiplier", "2"),
            {"dtype": "bf16", "optimizer": "sgd", "learning_rate": 0.5, "noise_multiplier": 2},
        ),
        (
            ("--max-grad-norm", "0.1", "--seed", "3", "--warmup", "0", "--steps", "1"),
            {"max_grad_norm": 0.1, "seed": 3, "warmup": 0, "steps": 1},
        ),
        (("--gpus", "1,2", "--parallel", "fsdp"), {"gpus": [1, 2], "parallel": "fsdp"}),
        (("--simulate-world", "8", "--link-gbps", "100"), {"simulate_world": 8, "link_gbps": 100.0}),
        (("--lora", "r=2,target=head"), {"lora": "r=2,target=head"}),
    ],
)
def test_a_command_line_and_python_plan_the_same_rows_in_the_same_order(flags, asked):
    assert planned_by_command(*flags) == comparison.specs_of("tiny", {"device": "cpu", **asked})


def test_standard_is_measured_first_whoever_plans():
    methods = ["ghost", "flash", "standard"]
    rows = make_sweep(TINY, methods=methods, batch_sizes=[2, 4], seq_lens=[8])
    assert [(spec.batch_size, spec.method) for spec in rows] == [
        *((2, method) for method in ("standard", "ghost", "flash")),
        *((4, method) for method in ("standard", "ghost", "flash")),
    ]
    assert plan_sweep(TINY, methods=methods, device="cpu").specs[0].method == "standard"


def test_what_is_for_another_machine_is_for_one_with_a_gpu():
    specs = planned_by_command("--dtype", "tf32", for_other_machine=True)
    assert {spec.device for spec in specs} == {"cuda"}


def test_in_python_all_is_a_word_and_what_is_left_out_a_warning():
    with pytest.warns(UserWarning, match="nsys is left out: there is no GPU"):
        specs = comparison.specs_of("tiny", {"instruments": "all", "methods": ["standard"], "device": "cpu"})
    assert [spec.instrument for spec in specs] == ["time", "memory", "ncu", "trace"]


def test_an_instrument_that_there_is_not_is_refused():
    with pytest.raises(UserError, match="unknown instrument 'everything'"):
        plan_sweep("tiny", instruments="everything", device="cpu")


def test_a_sweep_keeps_rows_that_are_compared_together():
    sweep = make_sweep(TINY, methods=["standard", "flat"], batch_sizes=[2, 4], seq_lens=[8, 16])
    assert [(spec.batch_size, spec.seq_len, spec.method) for spec in sweep] == [
        (2, 8, "standard"),
        (2, 8, "flat"),
        (2, 16, "standard"),
        (2, 16, "flat"),
        (4, 8, "standard"),
        (4, 8, "flat"),
        (4, 16, "standard"),
        (4, 16, "flat"),
    ]


def test_a_sweep_measures_a_row_named_twice_once():
    sweep = make_sweep(
        TINY, methods=["vanilla", "standard", "flat", "dpsgd"], batch_sizes=[4, 2, 4], seq_lens=[256, None]
    )
    assert [(spec.batch_size, spec.method) for spec in sweep] == [
        (4, "standard"),
        (4, "flat"),
        (2, "standard"),
        (2, "flat"),
    ]


def test_rows_of_one_compile_mode_stand_together_standard_first():
    plan = plan_sweep(
        TINY, methods=["flash", "standard"], compile=["none", "default"], instruments="time", device="cpu"
    )
    found = [(spec.compile, spec.method) for spec in plan.specs]
    assert found == [("none", "standard"), ("none", "flash"), ("default", "standard"), ("default", "flash")]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"compile": "fast"}, "unknown compile mode 'fast': choose one of none, default"),
        ({"compile": "reduce-overhead"}, "is CUDA graphs: use --compile default on the CPU"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_any_row(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        plan_sweep(TINY, device="cpu", **settings)


def test_rows_of_one_process_in_a_sweep_over_several_are_those_of_any_sweep():
    alone, *_, spread = plan_sweep(TINY, gpus=[1, 2], parallel="hsdp", device="cpu").specs
    assert alone == plan_sweep(TINY, device="cpu").specs[0]
    assert (spread.gpus, spread.parallel) == (2, "hsdp")


def test_rows_of_several_processes_are_left_to_instruments_that_can_look_at_them_unless_others_are_asked_for():
    def seen(**asked):
        plan = plan_sweep(TINY, methods=["standard"], gpus=[1, 2], device="cpu", **asked)
        return [(spec.gpus, spec.instrument) for spec in plan.specs], plan.remarks

    specs, remarks = seen()
    assert specs == [(1, "time"), (1, "memory"), (2, "time")]
    assert remarks[-1:] == ["memory looks at one process: rows of several are left out"]
    assert {instrument for gpus, instrument in seen(instruments="all")[0] if gpus == 2} == {"time", "trace"}
    assert seen(instruments=["memory"])[0] == [(1, "memory"), (2, "memory")]  # the second says why it is skipped


@pytest.mark.parametrize("settings", [{"parallel": "fsdp"}, {"link_gbps": 100.0}, {"gpus": 2, "link_gbps": 100.0}])
def test_settings_of_several_processes_that_would_do_nothing_are_refused(settings):
    with pytest.raises(UserError, match="--simulate-world N"):
        plan_sweep(TINY, device="cpu", **settings)


def test_several_processes_without_a_gpu_are_said_to_be_the_cpus():
    plan = plan_sweep("tiny", methods=["standard", "flash"], gpus=[1, 2], device="cpu", instruments="time")
    assert [remark for remark in plan.remarks if "no GPU here" in remark]
    assert plan_sweep("tiny", methods=["standard"], device="cpu", instruments="time").remarks == []
