"""Layers that mix samples are refused by name, with what to use instead."""

from __future__ import annotations

import pytest
from torch import nn

from dpscope.trainers.base import NotPrivateError, require_private_trainable


def test_every_layer_that_mixes_samples_is_named_with_its_replacement():
    model = nn.Sequential()
    model.stem = nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48))
    model.tail = nn.BatchNorm1d(7)
    with pytest.raises(NotPrivateError) as refusal:
        require_private_trainable(model)
    assert "stem.1 is BatchNorm2d, use nn.GroupNorm(16, 48)" in str(refusal.value)
    assert "tail is BatchNorm1d, use nn.GroupNorm(1, 7)" in str(refusal.value)


def test_a_model_that_is_itself_such_a_layer_is_named_too():
    with pytest.raises(NotPrivateError, match="the model itself is BatchNorm1d"):
        require_private_trainable(nn.BatchNorm1d(4))


def test_instance_norm_is_refused_only_while_it_keeps_statistics_of_the_batch():
    require_private_trainable(nn.InstanceNorm2d(4))
    with pytest.raises(NotPrivateError, match="track_running_stats=False"):
        require_private_trainable(nn.InstanceNorm2d(4, track_running_stats=True))


def test_layers_that_keep_samples_apart_pass():
    """Nothing is raised."""
    require_private_trainable(nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.LayerNorm(8), nn.Linear(8, 2)))


def test_a_frozen_batch_norm_passes_in_eval_mode_alone():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    model[1].requires_grad_(False)
    with pytest.raises(NotPrivateError, match="1 is BatchNorm2d, use eval"):
        require_private_trainable(model)
    model[1].eval()
    require_private_trainable(model)


def test_a_trained_batch_norm_is_refused_in_eval_mode_too():
    with pytest.raises(NotPrivateError, match="GroupNorm"):
        require_private_trainable(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval())
