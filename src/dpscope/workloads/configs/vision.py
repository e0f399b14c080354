"""Sizes of the built-in image classifiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpscope.errors import UserError
from dpscope.workloads.configs.base import WorkloadConfig, refuse_length, require_one_of, set_sizes

NORMS = ("none", "group", "batch")

# Depth -> residual blocks in each of the four stages; a bottleneck block has three convolutions, a basic one two.
RESNET_STAGES = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
BOTTLENECK_DEPTHS = (50, 101)


@dataclass(frozen=True, kw_only=True)
class ImageConfig(WorkloadConfig):
    """Square RGB images and a number of classes."""

    norms: ClassVar[tuple[str, ...]] = NORMS
    least_size: ClassVar[int] = 1

    image_size: int
    num_classes: int
    norm: str

    def __post_init__(self) -> None:
        set_sizes(self, "image_size", "num_classes")
        require_one_of("norm", self.norm, self.norms)
        if self.image_size < self.least_size:
            raise UserError(
                f"image size must be at least {self.least_size} for what model {self.name!r} pools away, "
                f"not {self.image_size}"
            )

    def resolve_seq_len(self, seq_len: int | None) -> None:
        refuse_length(seq_len, self.name)


@dataclass(frozen=True, kw_only=True)
class CNNConfig(ImageConfig):
    """Two convolutions with pooling and a Linear classifier."""

    kind: ClassVar[str] = "cnn"
    builder: ClassVar[str] = "dpscope.workloads.cnn:build"
    least_size: ClassVar[int] = 4

    image_size: int = 32
    num_classes: int = 10
    norm: str = "none"


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(ImageConfig):
    """A residual network; `width` channels leave the stem, and each of the four stages doubles them."""

    kind: ClassVar[str] = "resnet"
    builder: ClassVar[str] = "dpscope.workloads.resnet:build"
    norms: ClassVar[tuple[str, ...]] = ("group", "batch")
    least_size: ClassVar[int] = 32

    depth: int
    width: int = 64
    image_size: int = 224
    num_classes: int = 1000
    norm: str = "group"

    def __post_init__(self) -> None:
        super().__post_init__()
        set_sizes(self, "width")
        if self.depth not in RESNET_STAGES:
            raise UserError(f"a ResNet's depth must be one of {', '.join(map(str, RESNET_STAGES))}, not {self.depth}")


PRESETS = (
    CNNConfig(name="cnn"),
    ResNetConfig(name="resnet18", depth=18),  # 11.7M parameters
    ResNetConfig(name="resnet50", depth=50),  # 25.6M parameters
    # 0.3M parameters: a step takes milliseconds on a CPU
    ResNetConfig(name="resnet-tiny", depth=10, width=16, image_size=64, num_classes=10),
)
