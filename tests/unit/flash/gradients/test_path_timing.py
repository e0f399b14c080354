"""The paths of a product are measured on this device where that is asked for, each shape once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dpscope.flash import FlashEngine
from dpscope.flash.gradients import explanation
from dpscope.flash.gradients.explanation import time_paths
from dpscope.flash.gradients.paths import DIRECT, GRAM, KEEP, RANK1

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def shortly(monkeypatch):
    monkeypatch.setattr(explanation, "SHORTEST_RUN", 1e-4)


@pytest.mark.parametrize(
    ("length", "dtype", "paths"),
    [
        (6, torch.float32, [GRAM, DIRECT, KEEP]),
        (6, torch.bfloat16, [GRAM, DIRECT, KEEP]),
        (1, torch.float64, [RANK1, GRAM, DIRECT, KEEP]),
    ],
)
def test_every_path_that_is_exact_takes_some_time(length, dtype, paths):
    state = torch.get_rng_state()
    found = time_paths((3, length, 5), 4, dtype, CPU)
    assert list(found) == paths
    assert all(0.0 < seconds < 60.0 for seconds in found.values())
    assert torch.equal(torch.get_rng_state(), state)


def test_where_products_are_rounded_gram_norms_are_timed_with_the_copies_they_take(monkeypatch):
    copied = []
    monkeypatch.setattr(explanation, "reads_tf32", lambda device: True)
    monkeypatch.setattr(explanation, "truncated_to_tf32", lambda tensor: copied.append(tensor.shape) or tensor.clone())
    taken = time_paths((2, 6, 5), 3, torch.float32, torch.device("cpu"))
    assert set(taken) == {GRAM, DIRECT, KEEP}
    assert set(copied) == {(2, 6, 5), (2, 6, 3)}


def test_where_memory_runs_out_a_path_takes_forever(monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(explanation, "kept_products", full)
    found = time_paths((3, 6, 5), 4, torch.float32, CPU)
    assert found[KEEP] == math.inf
    assert found[GRAM] < 60.0


def explained(**options):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    with FlashEngine(model, max_grad_norm=1.0) as engine:
        model(torch.randn(3, 6, 4)).sum().backward()
        engine.finish()
        return engine.explain(**options)


def test_explain_measures_products_of_one_shape_once_and_only_if_asked_to(monkeypatch):
    asked = []

    def timed(*product):
        asked.append(product)
        return {GRAM: 2e-5, KEEP: math.inf}

    monkeypatch.setattr(explanation, "time_paths", timed)
    table = explained()
    assert not asked
    assert "measured" not in str(table)
    table = explained(measured=True)
    assert asked == [((3, 6, 4), 4, torch.float32, CPU)]
    assert [row.measured for row in table] == ["gram 20 µs, keep out of memory", ""] * 2 + ["", ""]
    assert str(table).count("gram 20 µs") == 2
