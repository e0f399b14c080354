"""The run spec: what it refuses and what makes two of them the same."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpscope.errors import UserError
from dpscope.runner.spec import RunSpec
from dpscope.runner.sweep import Limits
from dpscope.vocabulary.settings import DTYPES, OPTIMIZERS
from dpscope.workloads.configs import ATTENTIONS, NORMS, CNNConfig, TransformerConfig, make_config

TINY = make_config("tiny")
CNN = make_config("cnn")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"method": "magic"}, r"unknown method 'magic': choose from standard, flat, ghost"),
        ({"dtype": "fp8"}, r"unknown dtype 'fp8': choose one of fp32, tf32, bf16"),
        ({"optimizer": "lion"}, r"unknown optimizer 'lion': choose one of sgd, adam, adamw"),
        ({"device": "tpu"}, r"unknown device 'tpu': choose one of cpu, cuda"),
        ({"instrument": "ruler"}, r"unknown instrument 'ruler'"),
        ({"batch_size": 0}, r"batch size must be a whole number of at least 1, not 0"),
        ({"batch_size": -4}, r"batch size must be a whole number of at least 1, not -4"),
        ({"batch_size": 2.5}, r"batch size must be a whole number"),
        ({"batch_size": "8"}, r"batch size must be a whole number"),
        ({"batch_size": True}, r"batch size must be a whole number"),
        ({"seq_len": 0}, r"sequence length must be a whole number of at least 1, not 0"),
        ({"seq_len": -1}, r"sequence length must be a whole number of at least 1, not -1"),
        ({"seq_len": 513}, r"sequence length 513 is longer than the 512 positions .* --max-seq-len 513"),
        ({"warmup": -1}, r"warm-up steps must be a whole number of at least 0"),
        ({"steps": 0}, r"steps must be a whole number of at least 1, not 0"),
        ({"seed": -1}, r"seed must be a whole number of at least 0"),
        ({"learning_rate": 0.0}, r"learning rate must be a number above 0"),
        ({"learning_rate": float("nan")}, r"learning rate must be a number above 0"),
        ({"max_grad_norm": 0.0}, r"max grad norm must be a number above 0"),
        ({"max_grad_norm": float("inf")}, r"max grad norm must be a number above 0"),
        ({"noise_multiplier": -0.5}, r"noise multiplier must be zero or more"),
        ({"noise_multiplier": float("nan")}, r"noise multiplier must be zero or more"),
        ({"batch_size": 10**23}, r"batch size must be a whole number of at most 2147483647, not 1000"),
        ({"batch_size": 10**5000}, r"batch size must be .* not a number of more than 40 digits"),
        ({"batch_size": float("nan")}, r"batch size must be a whole number"),
        ({"batch_size": numpy.bool_(True)}, r"batch size must be a whole number"),
        ({"seq_len": float("nan")}, r"sequence length must be a whole number"),
        ({"seed": 2**63}, r"seed must be a whole number of at most 9223372036854775807"),
        ({"steps": 10**9}, r"steps must be a whole number of at most 1000000"),
        ({"learning_rate": True}, r"learning rate must be a number above 0, not True"),
        ({"learning_rate": "1e-3"}, r"learning rate must be a number above 0, not '1e-3'"),
        ({"learning_rate": 10**400}, r"learning rate must be a number above 0"),
        ({"max_grad_norm": 1e-300}, r"max grad norm must be a number above 0, from 1e-12 to 1e\+12, not 1e-300"),
        ({"max_grad_norm": numpy.float32("nan")}, r"max grad norm must be a number above 0, not nan"),
        ({"noise_multiplier": 1e300}, r"noise multiplier must be zero or more, from 1e-12 to 1e\+06"),
        ({"instrument": "ncu", "options": {"top": 0}}, r"--top must be a whole number of at least 1"),
        ({"instrument": "ncu", "options": {"budget": float("inf")}}, r"--budget, in seconds, must be a number above 0"),
        ({"instrument": "trace", "options": {"trace_steps": True}}, r"--trace-steps must be a whole number"),
        ({"instrument": "trace", "options": {"shapes": 1}}, r"option 'shapes' must be a bool, not 1"),
        ({"instrument": "nsys", "options": {"captured_steps": 0}}, r"captured steps must be a whole number"),
        ({"dtype": "tf32", "device": "cpu"}, r"tf32 is a CUDA number format: use fp32 or bf16 on the CPU"),
        ({"workload": CNN, "seq_len": 128}, r"takes images and has no sequence length: leave out --seq-len"),
    ],
)
def test_a_spec_that_cannot_be_measured_is_refused_with_a_sentence(change, sentence):
    with pytest.raises(UserError, match=sentence):
        RunSpec(**{"workload": TINY, "method": "standard", "batch_size": 2, "seq_len": 8, **change})


def test_numbers_of_numpy_are_the_same_spec_as_pythons():
    sizes = {"batch_size": 2, "seq_len": 8, "steps": 4, "seed": 3, "learning_rate": 0.5, "max_grad_norm": 2}
    theirs = {
        name: (numpy.float64 if isinstance(value, float) else numpy.int32)(value) for name, value in sizes.items()
    }
    ours = RunSpec(workload=TINY, method="flat", **sizes)
    spec = RunSpec(workload=make_config("tiny", vocab_size=numpy.int64(1000)), method="flat", **theirs)
    assert spec == ours and spec.digest == ours.digest
    assert type(spec.batch_size) is int and type(spec.max_grad_norm) is float


@pytest.mark.parametrize("limits", [{"timeout": math.nan}, {"timeout": math.inf}, {"timeout": 0}, {"memory": math.nan}])
def test_limits_that_are_no_numbers_are_refused(limits):
    with pytest.raises(UserError, match="must be a number above 0"):
        Limits(**limits)


@pytest.mark.parametrize(
    ("model", "change", "sentence"),
    [
        ("huge", {}, r"unknown model 'huge': choose one of tiny, small, 1b, cnn"),
        ("tiny", {"hidden_dim": 130}, r"hidden size 130 is not divisible by 4 attention heads: change --hidden-dim"),
        ("tiny", {"num_heads": 0}, r"num heads must be a whole number of at least 1, not 0"),
        ("tiny", {"vocab_size": -5}, r"vocab size must be a whole number of at least 1, not -5"),
        ("tiny", {"num_layers": 0}, r"num layers must be a whole number of at least 1"),
        ("tiny", {"attention": "flash"}, r"attention must be one of sdpa, opacus, not 'flash'"),
        ("tiny", {"image_size": 32}, r"model 'tiny' has no --image-size"),
        ("cnn", {"hidden_dim": 32}, r"model 'cnn' has no --hidden-dim"),
        ("cnn", {"image_size": 3}, r"image size must be at least 4"),
        ("cnn", {"norm": "layer"}, r"norm must be one of none, group, batch, not 'layer'"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_with_a_sentence(model, change, sentence):
    with pytest.raises(UserError, match=sentence):
        make_config(model, **change)


@pytest.mark.parametrize(
    ("alias", "name"), [("vanilla", "standard"), ("dpsgd", "flat"), ("dpsgd_ghost", "ghost"), ("ghost", "ghost")]
)
def test_an_alias_is_the_same_spec_as_the_name(make_spec, alias, name):
    assert make_spec(method=alias).method == name
    assert make_spec(method=alias) == make_spec(method=name)
    assert make_spec(method=alias).digest == make_spec(method=name).digest


def test_a_spec_cannot_be_changed(make_spec):
    with pytest.raises(FrozenInstanceError):
        make_spec().batch_size = 4


def test_the_sequence_length_left_out_is_256_or_what_the_model_has():
    assert RunSpec(workload=TINY, method="flat", batch_size=1).seq_len == 256
    assert RunSpec(workload=make_config("tiny", max_seq_len=64), method="flat", batch_size=1).seq_len == 64
    assert RunSpec(workload=CNN, method="flat", batch_size=1).seq_len is None


def test_equal_specs_have_equal_digests_whatever_number_type_was_given(make_spec):
    whole, decimal = make_spec(noise_multiplier=1, max_grad_norm=2), make_spec(noise_multiplier=1.0, max_grad_norm=2.0)
    assert whole == decimal
    assert whole.digest == decimal.digest


def test_the_digest_is_the_same_in_every_process(make_spec):
    spec = make_spec(method="ghost", learning_rate=3e-4)
    script = (
        "import json, sys; from dpscope.runner.spec import RunSpec; "
        "print(RunSpec.from_dict(json.loads(sys.argv[1])).digest)"
    )
    shuffled = dict(reversed(spec.to_dict().items()))  # the order of keys means nothing
    for hash_seed in ("1", "2"):
        output = subprocess.run(
            [sys.executable, "-c", script, json.dumps(shuffled)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert output.strip() == spec.digest


CHANGES = {
    "workload": make_config("tiny", num_layers=1, hidden_dim=32, num_heads=2, vocab_size=50, max_seq_len=32),
    "method": "flat",
    "batch_size": 3,
    "seq_len": 9,
    "dtype": "bf16",
    "param_dtype": "bf16",  # which needs the dtype, too
    "checkpoint_blocks": True,
    "compile": "default",
    "cuda_graph": True,  # which needs the device, too
    "accumulate": 2,
    "gpus": 2,
    "parallel": "fsdp",
    "simulate_world": 8,
    "link_gbps": 100.0,
    "memory_budget": "lean",
    "clipping": "automatic",
    "optimizer": "sgd",
    "learning_rate": 2e-4,
    "noise_multiplier": 0.5,
    "max_grad_norm": 0.1,
    "warmup": 1,
    "steps": 2,
    "seed": 1,
    "device": "cuda",
}


def test_changing_any_one_field_changes_the_digest_and_the_file_name(make_spec):
    needs = {"param_dtype": {"dtype": "bf16"}, "cuda_graph": {"device": "cuda"}}
    variants = [make_spec(), *(make_spec(**{name: value, **needs.get(name, {})}) for name, value in CHANGES.items())]
    assert {field.name for field in fields(RunSpec)} - {"instrument", "options"} == set(CHANGES)
    assert len({spec.digest for spec in variants}) == len(variants)
    assert len({spec.file_name for spec in variants}) == len(variants)


def test_specs_of_real_result_files_keep_their_digest_and_their_keys():
    """Sweeps of before are resumed: a row is found by its file's name and kept where its spec is equal."""
    files = list((Path(__file__).parents[3] / "benchmarks/results").rglob("results/*.json"))
    assert len(files) > 100
    written = {path: json.loads(path.read_text())["spec"] for path in files}
    for path, spec in written.items():
        again = RunSpec.from_dict(spec)
        if "options" in spec:  # older files have no such key; it was added before any release
            assert again.file_name == path.name
            assert again.to_dict() == spec
            assert list(again.to_dict()) == list(spec)  # results are read by people, too


positive = st.floats(min_value=1e-12, max_value=1e6)


@st.composite
def transformers(draw):
    heads = draw(st.integers(1, 8))
    return TransformerConfig(
        name="tiny",
        vocab_size=draw(st.integers(1, 10**6)),
        hidden_dim=heads * draw(st.integers(1, 64)),
        num_layers=draw(st.integers(1, 50)),
        num_heads=heads,
        max_seq_len=draw(st.integers(64, 4096)),
        attention=draw(st.sampled_from(ATTENTIONS)),
    )


cnns = st.builds(
    CNNConfig,
    name=st.just("cnn"),
    image_size=st.integers(4, 512),
    num_classes=st.integers(1, 1000),
    norm=st.sampled_from(NORMS),
)


@st.composite
def specs(draw):
    workload = draw(st.one_of(transformers(), cnns))
    lengths = st.none() if workload.kind == "cnn" else st.none() | st.integers(1, 64)
    return RunSpec(
        workload=workload,
        method=draw(st.sampled_from(["standard", "vanilla", "flat", "dpsgd", "ghost", "dpsgd_ghost"])),
        batch_size=draw(st.integers(1, 2**31 - 1)),
        seq_len=draw(lengths),
        dtype=draw(st.sampled_from(DTYPES)),
        optimizer=draw(st.sampled_from(list(OPTIMIZERS))),
        learning_rate=draw(positive),
        noise_multiplier=draw(st.just(0) | positive),
        max_grad_norm=draw(positive | st.integers(1, 10)),
        warmup=draw(st.integers(0, 100)),
        steps=draw(st.integers(1, 1000)),
        seed=draw(st.integers(0, 2**63 - 1)),
        device="cuda",
    )


@given(specs())
def test_a_spec_comes_back_the_same_from_json(spec):
    again = RunSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert again.digest == spec.digest
    assert again.file_name == spec.file_name


def test_a_file_name_says_what_a_person_would_ask(make_spec):
    assert make_spec(method="ghost").file_name.startswith("ghost_tiny_bs2_seq8_fp32-time-")
    assert RunSpec(workload=CNN, method="flat", batch_size=4).label == "flat cnn bs4 fp32"
