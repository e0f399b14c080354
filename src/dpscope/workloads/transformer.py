"""SimpleBigModel: a decoder transformer of layers that every clipping method supports."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.workloads.configs import TransformerConfig
from dpscope.workloads.data import random_workload
from dpscope.workloads.workload import Workload


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
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:  # tokens: (B, T) -> logits (B, T, vocabulary)
        # One row of positions a sample, contiguous: Opacus reads per-sample gradients off dimension 0.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
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


def build(config: TransformerConfig, *, batch_size: int, seq_len: int | None) -> Workload:
    return random_workload(config, SimpleBigModel, token_loss, batch_size=batch_size, seq_len=seq_len)
