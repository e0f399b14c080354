"""A model of one's own for dpscope: a function that returns a Workload. Take it as a pattern for yours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope import Workload


class Reader(nn.Module):
    """Reads a sequence of tokens and answers with one of four classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.mix = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.norm = nn.LayerNorm(32)
        self.answer = nn.Linear(32, 4)

    def forward(self, tokens: Tensor) -> Tensor:  # tokens: (B, T)
        x = self.embed(tokens)
        return self.answer(self.norm(x + self.mix(x)).mean(dim=1))  # (B, 4)


def make(batch_size: int, seq_len: int) -> Workload:
    def batch(seed: int, device: str) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(100, (batch_size, seq_len), generator=generator)
        return tokens.to(device), (tokens.sum(1) % 4).to(device)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:  # one loss per sample: (B,)
        tokens, labels = batch
        return F.cross_entropy(model(tokens), labels, reduction="none")

    return Workload(model=Reader, batch=batch, loss=loss)
