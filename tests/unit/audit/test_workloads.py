"""Workloads whose samples meet are found whatever the method; the transformer and the CNN raise no alarm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dpscope
from dpscope import Workload
from dpscope.workloads.configs import make_config
from dpscope.workloads.workload import build_workload
from tests.unit.audit import planted_loops
from tests.unit.audit.planted_loops import Sentences, sample_losses, token_losses


def sentences(seed, device):
    batches = list(planted_loops.make_batches(seed + 1))
    return {key: x.to(device) for key, x in batches[seed].items()}


class Normalised(Sentences):
    def forward(self, x):
        x = x.transpose(1, 2)
        x = F.batch_norm(x, None, None, training=True) if len(x) else x
        return super().forward(x.transpose(1, 2))


def token_mean(model, batch):
    return token_losses(model, batch).sum(1) * len(batch["x"]) / batch["mask"].sum().clamp(min=1)


def contrastive(model, batch):
    rows = F.normalize(model(batch["x"]).flatten(1), dim=1)
    return F.cross_entropy(rows @ rows.T * 5, torch.arange(len(rows)), reduction="none")


MIXING = {
    "a token mean over the batch": (
        Workload(model=Sentences, batch=sentences, loss=token_mean),
        "samples meet in the loss",
    ),
    "a contrastive loss": (Workload(model=Sentences, batch=sentences, loss=contrastive), "samples meet in the loss"),
    "F.batch_norm": (
        Workload(model=Normalised, batch=sentences, loss=sample_losses),
        "samples meet before first (Linear)",
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_meet_are_a_breach_of_every_method_that_does_not_refuse_and_the_place_is_named(name):
    workload, sentence = MIXING[name]
    found = dpscope.check(workload, ["flat", "ghost", "flash"])
    refused = {method.method for method in found.methods} - found.audits.keys()
    assert refused <= {"flash"} and not found.ok  # only flash clipping looks for samples that meet before it runs
    for audit in found.audits.values():
        assert audit.neighbours.verdict == "BREACH"
        assert sentence in audit.neighbours.faults[1], audit.neighbours.faults
        assert audit.noise.verdict == "held", audit.noise.faults


def test_the_same_model_with_a_loss_of_its_own_for_each_sample_holds():
    found = dpscope.check(Workload(model=Sentences, batch=sentences, loss=sample_losses), ["flat", "ghost", "flash"])
    assert found.ok, str(found)
    for audit in found.audits.values():
        assert audit.ok and audit.accounting.verdict == "held", str(audit)


def adversarial(model, batch):
    """The attack's gradient is taken of the inputs alone."""
    x = batch["x"].clone().requires_grad_()
    (direction,) = torch.autograd.grad(sample_losses(model, {**batch, "x": x}).sum(), x)
    return sample_losses(model, {**batch, "x": batch["x"] + 0.1 * direction.sign()})


def test_adversarial_training_is_a_breach_where_the_attack_is_counted_and_none_where_it_is_not():
    """Opacus's hooks keep what autograd.grad leaves: two shares for a sample, and half of the noise."""
    found = dpscope.check(Workload(model=Sentences, batch=sentences, loss=adversarial), ["flat", "flash"])
    assert found.audits["flat"].breached
    assert not found.audits["flash"].breached, str(found)


SMALL = {"num_layers": 1, "hidden_dim": 16, "num_heads": 2, "vocab_size": 50, "max_seq_len": 32}


@pytest.mark.parametrize("model", ["tiny", "cnn"])
def test_there_is_no_alarm_on_the_transformer_and_the_cnn(model):
    config = make_config("tiny", **SMALL) if model == "tiny" else make_config("cnn", image_size=8)
    workload = build_workload(config, batch_size=4, seq_len=12 if model == "tiny" else None)
    found = dpscope.check(workload)
    assert found.ok, str(found)
    assert set(found.audits) == {"flat", "ghost", "flash"}
    for audit in found.audits.values():
        assert audit.ok and audit.accounting.verdict == "held", str(audit)


def test_the_answer_prints_and_serialises_with_a_verdict_for_each_test():
    found = dpscope.check(MIXING["a token mean over the batch"][0], ["flash"])
    assert str(found).splitlines()[-1] == "flash: BREACH (neighbours)."
    audit = found.to_dict()["methods"][0]["audit"]
    assert [audit[test]["verdict"] for test in ("neighbours", "noise", "accounting")] == ["BREACH", "held", "held"]
    assert audit["neighbours"]["figures"]["largest_move_of_allowed"] > 1


def test_neighbours_can_be_left_out():
    found = dpscope.check(MIXING["F.batch_norm"][0], ["flash"], neighbours=False)
    assert found.audits == {} and found.methods[0].audit is None
