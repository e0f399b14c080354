"""Models that people train, small: Hugging Face's by configuration, adapters, a ResNet, and two of one's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from dpscope import Workload

VOCABULARY, LENGTH, SAMPLES = 31, 9, 4


def _tokens(seed, device, *, padded=False):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row, length in enumerate((LENGTH, 5, 7, 3)):
            ids[row, length:] = 0
            mask[row, length:] = 0
    classes = torch.randint(3, (SAMPLES,), generator=generator)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "classes": classes.to(device)}


def _next_token_loss(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none").mean(1)


def _class_loss(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(logits, batch["classes"], reduction="none")


def _images(seed, device):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
    return pixels.to(device), torch.randint(3, (SAMPLES,), generator=generator).to(device)


def _image_loss(model, batch):
    output = model(batch[0])
    return F.cross_entropy(getattr(output, "logits", output), batch[1], reduction="none")


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
    )


def llama_with_lora():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=16,
            num_labels=3,
        )
    )


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=8,
            patch_size=4,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            num_labels=3,
        )
    )


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


def _padded_tokens(seed, device):
    return _tokens(seed, device, padded=True)


MODELS = {
    "GPT-2 (tied)": Workload(model=gpt2, batch=_tokens, loss=_next_token_loss),
    "Llama": Workload(model=llama, batch=_tokens, loss=_next_token_loss),
    "LoRA on Llama": Workload(model=llama_with_lora, batch=_tokens, loss=_next_token_loss),
    "BERT with padding": Workload(model=bert, batch=_padded_tokens, loss=_class_loss),
    "ViT": Workload(model=vit, batch=_images, loss=_image_loss),
    "ResNet with GroupNorm": Workload(model=resnet, batch=_images, loss=_image_loss),
    "a module called twice": Workload(model=CalledTwice, batch=_images, loss=_image_loss),
    "a bare parameter": Workload(model=BareParameter, batch=_images, loss=_image_loss),
}
