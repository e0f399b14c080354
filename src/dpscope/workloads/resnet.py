"""A residual network whose normalisation keeps samples apart: GroupNorm where the original has BatchNorm."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.workloads.cnn import class_loss
from dpscope.workloads.configs.vision import BOTTLENECK_DEPTHS, RESNET_STAGES, ResNetConfig
from dpscope.workloads.data import random_workload
from dpscope.workloads.workload import Workload


def _norm(kind: str, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    # 32 groups, fewer where a group would be a single channel: on a 1×1 image that has nothing to normalise.
    groups = math.gcd(32, channels // 2) if channels % 2 == 0 else 1
    return nn.GroupNorm(groups, channels)


def _conv(channels_in: int, channels_out: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, size, stride=stride, padding=size // 2, bias=False)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions; or, as a bottleneck, a 3×3 between two 1×1 that narrow and widen four times."""

    def __init__(self, channels_in: int, width: int, *, stride: int, bottleneck: bool, norm: str) -> None:
        super().__init__()
        channels = 4 * width if bottleneck else width
        # (kernel size, channels, stride)
        layers = [(1, width, 1), (3, width, stride), (1, channels, 1)] if bottleneck else []
        layers = layers or [(3, width, stride), (3, width, 1)]
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        before = channels_in
        for size, after, step in layers:
            self.convolutions.append(_conv(before, after, size, step))
            self.norms.append(_norm(norm, after))
            before = after
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(_conv(channels_in, channels, 1, stride), _norm(norm, channels))

    def forward(self, x: Tensor) -> Tensor:  # x: (B, C, H, W)
        out = x
        for index, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            out = norm(convolution(out if index == 0 else F.relu(out)))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """Images (B, 3, size, size) to class scores (B, classes)."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        bottleneck = config.depth in BOTTLENECK_DEPTHS
        self.stem = nn.Sequential(
            _conv(3, config.width, 7, stride=2), _norm(config.norm, config.width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        stages, channels = [], config.width
        for stage, blocks in enumerate(RESNET_STAGES[config.depth]):
            width = config.width * 2**stage
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(ResidualBlock(channels, width, stride=stride, bottleneck=bottleneck, norm=config.norm))
                channels = 4 * width if bottleneck else width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, config.num_classes)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))
        return scores


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def build(config: ResNetConfig, *, batch_size: int, seq_len: int | None) -> Workload:
    return random_workload(config, ResNet, class_loss, batch_size=batch_size, seq_len=seq_len)
