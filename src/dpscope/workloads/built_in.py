"""Built-in models: a decoder transformer of layers that every clipping method supports, and image classifiers.

The residual network has GroupNorm where the original has BatchNorm, which keeps samples apart.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.workloads.configs import CNNConfig, TransformerConfig
from dpscope.workloads.configs.base import BOTTLENECK_DEPTHS, RESNET_STAGES, ResNetConfig
from dpscope.workloads.workload import random_workload


class SelfAttention(nn.Module):
    """Causal attention over four ordinary Linears, so that hooks and taps see every weight."""

    def __init__(self, hidden_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(hidden_dim, hidden_dim)
        self.key = nn.Linear(hidden_dim, hidden_dim)
        self.value = nn.Linear(hidden_dim, hidden_dim)
        self.output = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:  # x: (B, T, d)
        batch, length, width = x.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (layer(x).reshape(heads).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, T, d / heads)
        # Opacus's per-sample gradient rules need contiguous activations.
        result: Tensor = self.output(mixed.transpose(1, 2).contiguous().reshape(batch, length, width))
        return result


class OpacusAttention(nn.Module):
    """Opacus's replacement for nn.MultiheadAttention, as a cost to compare with.

    Not causal: with `batch_first` Opacus 1.6.0 compares a mask's sides with the batch size and refuses it.
    """

    def __init__(self, hidden_dim: int, num_heads: int) -> None:
        super().__init__()
        from opacus.layers import DPMultiheadAttention

        self.attention = DPMultiheadAttention(hidden_dim, num_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # x: (B, T, d)
        mixed: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return mixed


ATTENTION_LAYERS = {"sdpa": SelfAttention, "opacus": OpacusAttention}


class Block(nn.Module):
    """Pre-norm attention and a four times wider GELU layer, each added to the residual stream."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.hidden_dim
        self.attention_norm = nn.LayerNorm(width)
        self.attention = ATTENTION_LAYERS[config.attention](width, config.num_heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # x: (B, T, d)
        x = x + self.attention(self.attention_norm(x))
        mlp: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + mlp


class SimpleBigModel(nn.Module):
    """Token and position embeddings, blocks, a final norm, an untied head."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.positions = nn.Embedding(config.max_seq_len, config.hidden_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_dim)
        self.head = nn.Linear(config.hidden_dim, config.vocab_size, bias=False)
        self.apply(_initialise_transformer)

    def forward(self, tokens: Tensor) -> Tensor:  # tokens: (B, T) -> logits (B, T, vocabulary)
        # One row of positions a sample, contiguous: Opacus reads per-sample gradients off dimension 0.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise_transformer(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy, averaged over each sample's tokens: (B,)."""
    tokens, targets = batch
    logits = model(tokens)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets).mean(dim=1)


build_transformer = partial(random_workload, model=SimpleBigModel, loss=token_loss)


def _norm_or_none(kind: str, channels: int) -> list[nn.Module]:
    if kind == "group":
        return [nn.GroupNorm(8, channels)]
    if kind == "batch":
        return [nn.BatchNorm2d(channels)]
    return []


class SmallCNN(nn.Sequential):
    """Images (B, 3, size, size) to class scores (B, classes)."""

    def __init__(self, config: CNNConfig) -> None:
        super().__init__(
            nn.Conv2d(3, 64, kernel_size=3, padding=1),
            *_norm_or_none(config.norm, 64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, kernel_size=3, padding=1),
            *_norm_or_none(config.norm, 128),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d((1, 1)),
            nn.Flatten(),
            nn.Linear(128, config.num_classes),
        )


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of each image: (B,)."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


build_cnn = partial(random_workload, model=SmallCNN, loss=class_loss)


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
        self.apply(_initialise_resnet)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))
        return scores


def _initialise_resnet(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


build_resnet = partial(random_workload, model=ResNet, loss=class_loss)
