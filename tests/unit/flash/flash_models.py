"""Small models and batches shared by the flash tests: each a function of a seed, each a few thousand parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = norm(width), norm(width)
        # Softmax does not see a bias of k: its gradient is nothing but rounding, and has no relative error to speak of.
        self.q, self.k, self.v = (nn.Linear(width, width, bias=name != "k") for name in "qkv")
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        h = self.norm1(x)
        q, k, v = (
            f(h).view(batch, length, self.heads, width // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A decoder transformer; positions come with a leading dimension of 1, as in Hugging Face models."""

    def __init__(
        self, vocabulary: int = 17, width: int = 8, layers: int = 2, *, tied: bool = False, norm: type = nn.LayerNorm
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, 2, norm) for _ in range(layers))
        self.norm = norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_batch(batch: int, length: int, vocabulary: int = 17) -> dict[str, Tensor]:
    """ids with repeats and padding (0); labels, some of them ignored (-100)."""
    ids = torch.randint(0, min(vocabulary, 6), (batch, length))
    labels = torch.randint(0, vocabulary, (batch, length))
    labels[:, ::3] = -100
    return {"ids": ids, "labels": labels}


def token_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(B,): each sample's cross entropy, summed over its tokens that are not ignored."""
    logits = model(batch["ids"])
    losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], ignore_index=-100, reduction="none")
    return losses.sum(1)


class EveryFamily(nn.Module):
    """One layer of each family, a unit without one, and in-place activations between them. ids: (B, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.linear, self.layer_norm, self.rms_norm = nn.Linear(6, 6), nn.LayerNorm(6), nn.RMSNorm(6)
        self.conv, self.group_norm = nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.instance_norm, self.act = nn.InstanceNorm1d(4, affine=True), nn.ReLU(inplace=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.slope, self.head = nn.PReLU(), nn.Linear(6, 3, bias=False)

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        x = self.act(self.linear(self.table(ids)))
        x = self.rms_norm(self.layer_norm(x) + 0.1)
        x = self.act(self.instance_norm(self.group_norm(self.act(self.conv(x))))) + x
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return scale * self.head(self.slope(x))


def randomised(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    return norm


class LlamaRMSNorm(nn.Module):
    """Hugging Face's, by its published code."""

    __module__ = "transformers.models.llama.modeling_llama"

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-4

    def forward(self, hidden_states):
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


def sine_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).sin().flatten(1).sum(1)
