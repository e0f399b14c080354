"""A loop that breaches what privacy rests on is found and its fault named; a right one is left alone."""

from __future__ import annotations

import pytest

import dpscope
from tests.unit.audit import planted_loops

OTHERS_STAY = "for the other samples every module's output and output gradient stay as they were"
UNTRACED = "which module it is cannot be traced: none is called with a batch of samples"

# What was planted -> the test that must find it, and what it has to say.
BREACHES = {
    "TokenMeanOverTheBatch": ("neighbours", "samples meet in the loss"),
    "TokenMeanTimesTheBatchSize": ("neighbours", "samples meet in the loss"),
    "MeanBeforeClipping": ("neighbours", "a sample's share depends on the batch's own size: "),
    "WeighsByRank": ("neighbours", "the noiseless sum moves by"),
    "NormsOfTheFirstStep": ("neighbours", "are norms kept from earlier parameters?"),
    "CountsTwiceTheSample": ("neighbours", "a sample's share is 2 C in every batch: it counts 2 times"),
    "ClipsTooHigh": ("neighbours", "a sample's share is 1.5 C in every batch: its norm is taken too small"),
    "NeverClipsLoneOnes": ("neighbours", "own size: 147 C in a batch of 1, 1 C in a batch of 2"),
    "TruncatedNoise": ("noise", "the noise is cut off: none of "),
    "ClampedNoise": ("noise", "the noise is cut off: none of "),
    "TruncatedNoiseOfTheRightSize": ("noise", "values is beyond 2.61 σC, where normal ones reach about 3."),
    "FixedBatches": ("accounting", "the sizes of its batches vary by ±0 around 4"),
    "Contrastive": ("neighbours", "samples meet in the loss"),
    "BatchNormalised": ("neighbours", "samples meet before first (Linear)"),
    "PositionsAsSamples": ("neighbours", OTHERS_STAY),
    "CountsAttacksToo": ("neighbours", UNTRACED),
    "ClipsTheBatch": ("neighbours", OTHERS_STAY),
    "NeverClips": ("neighbours", "goes into the sum as it is: it is not clipped"),
    "KeepsGradients": ("neighbours", "something of one step is carried into the next"),
    "RunningMean": ("neighbours", "mean, no parameter, changes with a single sample, and no noise is added"),
    "DividesByTheBatchsOwnSize": ("noise", "the size of the noise depends on the batch"),
    "NoNoise": ("noise", "no noise is added: with and without it a step is the same"),
    "HalfTheNoise": ("noise", "the noise has a standard deviation of 0."),
    "NoNoiseOnTheBias": ("noise", "no noise is added to head.bias, which every sample moves"),
    "HalfTheNoiseOnTheBias": ("noise", "the noise on head.bias has a standard deviation of 0."),
    "NoNoiseOnEmptyBatches": ("noise", "steps add no noise at all (batches of 0)"),
    "TheSameNoiseEveryStep": ("noise", "noise is not fresh: step 2 draws the noise of step 1"),
    "TheSameNoiseTwice": ("noise", "noise is not fresh: step 5 draws the noise of step 4"),
    "NoiseWithItsSignChanged": ("noise", "step 2 draws the noise, with its sign changed, of step 1"),
    "OneParametersNoiseForever": ("noise", "draws the noise of the step before it for second.weight"),
    "SharedNoise": ("noise", "noise is shared: third.weight is given the noise of first.weight"),
    "SeededForEachParameter": ("noise", "noise is shared: second.weight is given the noise of first.weight"),
    "OneRowOfNoise": ("noise", "repeats itself: one value is given to several entries"),
    "Laplace": ("noise", "the noise is not normal"),
    "Shifted": ("noise", "is not centred: its mean is "),
    "ResumesItsNoise": ("noise", "step 22 after resuming (1) draws the noise of step 22"),
    "OneSeedForAllRuns": ("noise", "draws the noise of step 1"),
    "SkipsEmptyBatches": ("accounting", "counted 4 steps where 6 were taken: empty batches are not counted"),
    "CountsTwice": ("accounting", "counted 12 steps where 6 were taken"),
    "WrongRate": ("accounting", "was told a sample rate of 0.003 for 1 steps, where batches are drawn at 0.02"),
    "WrongSigma": ("accounting", "was told a noise multiplier of 2 for 6 steps, where 1 was asked for"),
    "LowEpsilon": ("accounting", "the accountant says ε = 0.001 at δ = 1e-05; Opacus's prv accountant says 0.6"),
}
# A fault of one kind may well be seen by a second test.
ALSO = {"DividesByTheBatchsOwnSize": {"neighbours"}, "KeepsGradients": {"noise"}}


def audit(fault: str, **options):
    planted = getattr(planted_loops, fault)
    return dpscope.check_loop(lambda **settings: planted(**settings).loop(), planted_loops.make_batches(), **options)


@pytest.mark.parametrize("fault", BREACHES)
def test_a_planted_breach_is_found_by_its_test_and_named(fault):
    test, sentence = BREACHES[fault]
    found = audit(fault)
    assert not found.ok and found.breached
    breached = {name for name, finding in found.findings() if finding.verdict == "BREACH"}
    assert breached == {test} | ALSO.get(fault, set())
    finding = getattr(found, test)
    assert any(sentence in fault for fault in finding.faults), finding.faults


@pytest.mark.parametrize("seed", range(4))
def test_a_private_loop_holds_whatever_the_seed(seed):
    found = audit("ByHand", seed=1000 * seed)
    assert found.ok, str(found)
    assert [finding.verdict for _, finding in found.findings()] == ["held"] * 3
    assert found.neighbours.trials >= 25 and found.noise.trials >= 48 and found.accounting.trials == 6
    # The bound is reached, so that anything beyond it would have been seen.
    assert 0.99 < found.neighbours.figures["largest_move_of_allowed"] <= 1


@pytest.mark.parametrize("noise_multiplier", [0.3, 5.0])
def test_the_noise_is_held_against_the_noise_multiplier_that_was_asked_for(noise_multiplier):
    assert audit("ByHand", noise_multiplier=noise_multiplier).ok
    assert audit("HalfTheNoise", noise_multiplier=noise_multiplier).noise.verdict == "BREACH"


def test_a_clip_norm_of_ones_own_is_tried_as_well():
    assert audit("ByHand", max_grad_norm=0.7).ok
    assert audit("PositionsAsSamples", max_grad_norm=0.7).neighbours.verdict == "BREACH"
