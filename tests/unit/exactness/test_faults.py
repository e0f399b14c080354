"""A method that is wrong is found, and what is wrong with it is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

import dpscope
from tests.unit.exactness import planted_faults

TIE = "tokens.weight = head.weight"

# What was planted -> what the check has to say, all of it.
FAULTS = {
    "ForgetsTheBias": ["does not move hidden.bias, though the loss depends on it: forgotten, or never trained"],
    "ForgetsTheBiasInNorms": ["norms leave out hidden.bias: samples are clipped too little"],
    "AdapterNeverTrains": ["does not move adapter.weight", "norms leave out adapter.weight"],
    "IgnoresTyingInNorms": [f"norms ignore that parameters are tied ({TIE})"],
    "IgnoresTyingInSums": [f"tied parameter {TIE}: only its use as head.weight is counted"],
    "TimesTheBatchSize": ["every parameter's update is 4 times (= the batch size) what it should be"],
    "OverTheBatchSize": ["every parameter's update is 0.25 times (= 1 / the batch size) what it should be"],
    "NormsOfTheMeanLoss": ["norms are too small by the batch size"],
    "ClipsEachLayer": [
        "a sample's factor differs from parameter to parameter (sample",
        "each layer is clipped by itself",
    ],
    "MaxForMin": ["factors are max(1, C/norm) where min(1, C/norm) is right"],
    "NeverClips": ["samples are not clipped: each counts the same whatever its norm"],
    "Normalises": ["every sample is scaled to the clip norm, those below it too"],
    "ForgetsTheRoot": ["the square root of the squared norm was not taken"],
    "ClipsTheBatch": ["the batch's mean gradient is clipped, not each sample's"],
    "AddsAConstant": ["norms are larger by about 1.0e-03, each by the same"],
    "ExchangesFactors": ["factors are given to the wrong samples: sample 0 has that of sample 1, sample 1 has that of"],
    "OneSampleTwice": ["norms are wrong: sample 0 is clipped as if its norm were"],
    "MixesGradients": ["not made of the samples' gradients with one factor a sample"],
    "AddsNoise": ["two runs of the same step with different seeds differ", "noise is added though none was asked for"],
    "MovesTheFrozen": ["moves parameters that are frozen (requires_grad is False): frozen.weight"],
    "DoesNothing": ["no parameter moves in a step: nothing is trained"],
    "NotANumber": ["the step leaves inf or NaN in tokens.weight, hidden.weight, hidden.bias and 1 more"],
    "WrongInOneLayer": ["the gradient of hidden.weight is wrong even where nothing is clipped", "is 2 times what it"],
    "LowPrecision": ["no parameter's gradient is right even where nothing is clipped (relative errors"],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(check_planted, fault):
    found, method = check_planted(fault)
    assert method.verdict == "NOT EXACT"
    assert not found.ok
    said = "\n".join(method.faults)
    for sentence in FAULTS[fault]:
        assert sentence in said
    assert len(method.faults) <= len(FAULTS[fault]), said  # and nothing else is blamed


def test_a_padding_row_that_is_trained_is_named(check_planted):
    workload = replace(planted_faults.LITTLE, model=planted_faults.Padded)
    assert check_planted("ByHand", workload)[0].ok
    _, method = check_planted("TrainsThePadding", workload)
    assert method.faults[0] == (
        "the gradient of tokens.weight is wrong even where nothing is clipped: row 0 of tokens.weight, the padding "
        "(padding_idx), is trained, and nn.Embedding keeps it as it is"
    )


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("exact", ["ByHand", "OnACopy"])
def test_a_method_that_is_right_is_found_exact_wherever_it_keeps_its_model(check_planted, exact, dtype):
    found, method = check_planted(exact, dtype=dtype)
    assert method.faults == [] and method.verdict == "exact" and found.ok
    limit = {"fp32": 1e-5, "fp64": 1e-9}[dtype]
    assert method.worst.parameter_error < limit and method.norm_error < limit and method.factor_error < limit


def test_a_trainer_class_can_be_given_as_it_is_and_the_answer_prints_as_the_command_does():
    found = dpscope.check(planted_faults.LITTLE, ["flash", planted_faults.MaxForMin], neighbours=False)
    assert [method.verdict for method in found.methods] == ["exact", "NOT EXACT"]
    printed = str(found).splitlines()
    assert printed[0].startswith("workload, batch 4, fp32: 4 of 6 parameters train")
    assert printed[-1] == "flash: exact to 1e-05 in every parameter; MaxForMin: NOT EXACT."


def test_a_method_that_fails_in_its_own_code_is_shown_by_its_own_frames(check_planted):
    found, method = check_planted("Raises")
    assert not found.ok
    assert method.verdict == "failed" and method.reason == "KeyError: 'no such key'"
    assert method.details.startswith('  File "') and "planted_faults.py" in method.details.splitlines()[0]
    assert "exactness/check.py" not in method.details
    assert method.details.endswith("KeyError: 'no such key'")


def test_a_method_that_refuses_the_model_is_skipped_and_alone_proves_nothing(check_planted):
    found, method = check_planted("Refuses")
    assert method.verdict == "skipped" and "Embedding is not supported" in method.reason
    assert not found.ok


def test_a_trainer_class_is_checked_as_it_is_given_wherever_it_was_defined():
    class Halved(planted_faults.ByHand):
        def combine(self, name, gradients, factors):
            return super().combine(name, gradients, factors) / 2

    found = dpscope.check(planted_faults.LITTLE, [planted_faults.ByHand, Halved], neighbours=False)
    assert [(method.method, method.verdict) for method in found.methods] == [
        ("ByHand", "exact"),
        ("Halved", "NOT EXACT"),
    ]
