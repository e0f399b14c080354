"""The ResNet is the published one, with a normalisation that keeps samples apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash.engine import FlashEngine
from dpscope.flash.oracle import run_oracle
from dpscope.workloads.configs import make_config
from dpscope.workloads.workload import build_workload


def build(model, **sizes):
    with torch.device("meta"):
        return build_workload(make_config(model, **sizes), batch_size=1, seq_len=None).model()


# As published for 1000 classes; GroupNorm has as many parameters as BatchNorm.
@pytest.mark.parametrize(("model", "parameters"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_it_has_as_many_parameters_as_the_published_one(model, parameters, norm):
    assert sum(p.numel() for p in build(model, norm=norm).parameters()) == parameters


def test_group_norm_has_32_groups_and_never_a_group_of_one_channel():
    groups = [module for module in build("resnet18").modules() if isinstance(module, nn.GroupNorm)]
    assert {module.num_groups for module in groups} == {32}
    for module in build("resnet-tiny", width=6).modules():
        if isinstance(module, nn.GroupNorm):
            assert module.num_channels // module.num_groups > 1


def test_an_image_does_not_see_the_others_of_its_batch():
    workload = build_workload(make_config("resnet-tiny"), batch_size=3, seq_len=None)
    torch.manual_seed(0)
    model, (images, _) = workload.model(), workload.batch(0, torch.device("cpu"))
    together = model(images)
    alone = torch.cat([model(image) for image in images.split(1)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_flash_is_exact_on_bottlenecks():
    """In float64: fifty narrow layers under GroupNorm magnify float32's rounding beyond any tolerance worth having."""
    workload = build_workload(
        make_config("resnet50", width=2, image_size=32, num_classes=3), batch_size=3, seq_len=None
    )
    torch.manual_seed(0)
    model = workload.model().double()
    images, labels = workload.batch(0, torch.device("cpu"))
    batch = (images.double(), labels)

    def mean_loss(model, batch):
        return workload.loss(model, batch).mean()

    truth = run_oracle(model, batch, mean_loss, max_grad_norm=0.1)
    with FlashEngine(model, max_grad_norm=0.1) as engine:
        mean_loss(model, batch).backward()
        engine.finish()
    assert (truth.factors < 1).all()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, truth.clipped_sums[name], rtol=1e-6, atol=1e-9)


def test_images_and_classes_are_flags():
    workload = build_workload(make_config("resnet-tiny", image_size=48, num_classes=7), batch_size=2, seq_len=None)
    images, labels = batch = workload.batch(0, torch.device("cpu"))
    assert images.shape == (2, 3, 48, 48)
    assert workload.model()(images).shape == (2, 7)
    assert workload.loss(workload.model(), batch).shape == labels.shape == (2,)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"norm": "none"}, "norm must be one of group, batch, not 'none'"),
        ({"image_size": 16}, "image size must be at least 32 for what model 'resnet18' pools away, not 16"),
        ({"hidden_dim": 16}, "model 'resnet18' has no --hidden-dim"),
    ],
)
def test_what_cannot_be_built_is_refused_with_a_sentence(sizes, sentence):
    with pytest.raises(UserError, match=sentence):
        make_config("resnet18", **sizes)
