"""Models that people train, small: Hugging Face's by configuration, adapters, a ResNet, and two of one's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from dpscope import Workload
from tests.tiny_models.hugging_face import MODELS as TINY
from tests.tiny_models.hugging_face import batch_of, class_losses, next_token_losses


def _batch(seed, device):
    return {key: value.to(device) for key, value in batch_of(seed, side=8).items()}


def _images(seed, device):
    batch = _batch(seed, device)
    return batch["pixels"], batch["classes"]


def _image_loss(model, batch):
    output = model(batch[0])
    return F.cross_entropy(getattr(output, "logits", output), batch[1], reduction="none")


def llama_with_lora():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(TINY["Llama"].build(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


class ResidualBlock(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(2, width) for _ in range(3))
        self.shortcut = nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.norms[2](self.shortcut(x)))


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        ResidualBlock(4, 4, 1),
        ResidualBlock(4, 8, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.again, self.head = nn.Linear(192, 10), nn.Linear(10, 10), nn.Linear(10, 3)

    def forward(self, images):
        x = torch.tanh(self.start(images.flatten(1)))
        return self.head(torch.tanh(self.again(torch.tanh(self.again(x)))))


class BareParameter(nn.Module):
    """Its own parameters beside a submodule, used in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.mix = nn.Parameter(torch.rand(192)), nn.Parameter(torch.randn(12, 192) / 14)
        self.head = nn.Linear(12, 3)

    def forward(self, images):
        return self.head(torch.tanh((images.flatten(1) * self.scale) @ self.mix.T))


MODELS = {
    "GPT-2 (tied)": Workload(model=TINY["GPT2"].build, batch=_batch, loss=next_token_losses),
    "Llama": Workload(model=TINY["Llama"].build, batch=_batch, loss=next_token_losses),
    "LoRA on Llama": Workload(model=llama_with_lora, batch=_batch, loss=next_token_losses),
    "BERT with padding": Workload(model=TINY["Bert"].build, batch=_batch, loss=class_losses),
    "ViT": Workload(model=lambda: TINY["ViT"].build(image_size=8), batch=_images, loss=_image_loss),
    "ResNet with GroupNorm": Workload(model=resnet, batch=_images, loss=_image_loss),
    "a module called twice": Workload(model=CalledTwice, batch=_images, loss=_image_loss),
    "a bare parameter": Workload(model=BareParameter, batch=_images, loss=_image_loss),
}
