"""What is trained: sizes, seeded data, a loss for each sample."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dpscope.workloads.built_in import SimpleBigModel
from dpscope.workloads.configs import PRESETS, make_config
from dpscope.workloads.workload import build_workload, get_random_dataloader

SMALL = make_config("tiny", num_layers=2, hidden_dim=16, num_heads=2, vocab_size=40, max_seq_len=16)


@pytest.mark.parametrize(
    ("name", "least", "most"), [("tiny", 0.9e6, 1.3e6), ("small", 30e6, 40e6), ("1b", 1.05e9, 1.2e9)]
)
def test_a_preset_is_as_large_as_it_says(name, least, most):
    with torch.device("meta"):
        model = build_workload(PRESETS[name], batch_size=1, seq_len=8).model()
    assert least < sum(p.numel() for p in model.parameters()) < most


def test_the_billion_parameter_model_has_the_dimensions_people_know():
    config = PRESETS["1b"]
    assert (config.vocab_size, config.hidden_dim, config.num_layers, config.num_heads) == (32000, 2048, 20, 16)


def test_a_position_sees_itself_and_what_came_before():
    torch.manual_seed(0)
    model = SimpleBigModel(SMALL)
    tokens = torch.randint(40, (2, 10))
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 40
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :6], before[:, :6])
    assert not torch.allclose(after[:, 6:], before[:, 6:])


def test_every_weight_of_attention_lies_in_an_ordinary_layer():
    kinds = {
        type(module)
        for module in SimpleBigModel(SMALL).modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    assert kinds == {torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm}


def test_attention_of_opacus_can_be_asked_for():
    from opacus.layers import DPMultiheadAttention

    model = SimpleBigModel(make_config("tiny", num_layers=1, attention="opacus"))
    assert sum(isinstance(module, DPMultiheadAttention) for module in model.modules()) == 1
    assert model(torch.zeros(2, 8, dtype=torch.long)).shape == (2, 8, 1000)


def test_a_samples_loss_is_the_mean_over_its_tokens_and_knows_no_other_sample():
    torch.manual_seed(0)
    workload = build_workload(SMALL, batch_size=3, seq_len=8)
    model = workload.model()
    tokens, targets = workload.batch(0, torch.device("cpu"))
    losses = workload.loss(model, (tokens, targets))
    assert losses.shape == (3,)
    for sample in range(3):
        alone = F.cross_entropy(model(tokens[sample : sample + 1])[0], targets[sample])
        torch.testing.assert_close(losses[sample], alone)


@pytest.mark.parametrize("norm", ["none", "group", "batch"])
def test_the_cnn_gives_a_loss_for_each_image(norm):
    workload = build_workload(make_config("cnn", image_size=8, norm=norm), batch_size=3, seq_len=None)
    images, labels = batch = workload.batch(0, torch.device("cpu"))
    assert images.shape == (3, 3, 8, 8)
    assert labels.shape == (3,)
    assert workload.loss(workload.model(), batch).shape == (3,)


def test_targets_are_the_next_tokens():
    ((inputs, targets),) = get_random_dataloader(SMALL, batch_size=4, seq_len=8)
    assert inputs.shape == targets.shape == (4, 8)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert 0 <= int(inputs.min()) <= int(inputs.max()) < 40


@pytest.mark.parametrize("config", [SMALL, make_config("cnn", image_size=8)])
def test_a_seed_means_the_same_data_every_time_and_another_seed_other_data(config):
    def batches(seed):
        return [
            part for batch in get_random_dataloader(config, batch_size=2, num_batches=3, seed=seed) for part in batch
        ]

    assert len(batches(1)) == 6
    assert all(torch.equal(a, b) for a, b in zip(batches(1), batches(1), strict=True))
    assert not torch.equal(batches(1)[0], batches(2)[0])
