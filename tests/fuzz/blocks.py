"""The blocks of random models: on tokens (B, T, d), on images (B, d, side, side), and wrappers around either.

A table's entry makes a block from a generator and sizes. Every block treats samples apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint


@dataclass
class Sizes:
    """Of one model: `length` T and `width` d, or an image of `side` with `width` channels."""

    length: int
    width: int
    side: int
    vocabulary: int


class Block(nn.Module):
    """Parts by their names, and a forward pass that is a function of the block and its input."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            is_buffer = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
            self.register_buffer(name, part) if is_buffer else setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def transposed(inner: nn.Module) -> Block:
    """A module that works on (B, d, T)."""
    return Block(lambda block, x: block.inner(x.transpose(1, 2)).transpose(1, 2), inner=inner)


def _time_major(inner: nn.Module) -> Block:
    return Block(lambda block, x: block.inner(x.transpose(0, 1)).transpose(0, 1), inner=inner)


def _flattened(inner: nn.Module) -> Block:
    return Block(lambda block, x: block.inner(x.reshape(-1, x.shape[-1])).view(x.shape), inner=inner)


def _attention(width: int, heads: int) -> Block:
    def attend(block: Any, x: Tensor) -> Tensor:
        q, k, v = block.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + block.out(y.transpose(1, 2).flatten(2))

    return Block(attend, qkv=nn.Linear(width, 3 * width), out=nn.Linear(width, width))


def _torch_attention(width: int, heads: int, length: int) -> Block:
    """nn.MultiheadAttention with a mask (T, T) that all samples share."""
    return Block(
        lambda block, x: x + block.inner(x, x, x, attn_mask=block.mask, need_weights=False)[0],
        inner=nn.MultiheadAttention(width, heads, batch_first=True),
        mask=torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1),
    )


def _recurrent(cls: type[nn.RNNBase], width: int, *, batch_first: bool = True) -> Block:
    return Block(lambda block, x: block.inner(x)[0], inner=cls(width, width, batch_first=batch_first))


def _scale(*shape: int) -> Block:
    return Block(lambda block, x: x * block.scale, scale=nn.Parameter(1.0 + 0.1 * torch.randn(shape)))


def _positions(length: int, width: int) -> Block:
    return Block(lambda block, x: x + block.table, table=nn.Parameter(torch.randn(length, width)))


def _bare(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def _scaled_in_place(block: Any, x: Tensor) -> Tensor:
    y = block.inner(x)
    y *= block.scale
    return y.add_(block.table)


def _experts(block: Any, x: Tensor) -> Tensor:
    weights = block.router(x).softmax(-1)
    return x + sum(weights[..., e : e + 1] * (x @ block.weights[e]) for e in range(len(block.weights)))


# Parameters that a block owns itself, and uses in many ways; its layers beside them.
OWN_PARAMETERS: dict[str, Callable[[int, int], Block]] = {
    "token": lambda length, width: Block(
        lambda block, x: torch.cat([block.token.expand(len(x), -1, -1), block.inner(x)], 1)[:, :length],
        token=_bare(1, 1, width),
        inner=nn.Linear(width, width),
    ),
    "linear": lambda length, width: Block(
        lambda block, x: F.linear(x, block.weight, block.bias), weight=_bare(width, width), bias=_bare(width)
    ),
    "product": lambda length, width: Block(lambda block, x: x + x @ block.weight.T, weight=_bare(width, width)),
    "normalised weight": lambda length, width: Block(
        lambda block, x: F.linear(x, block.weight / block.weight.norm()), weight=_bare(width, width)
    ),
    "sliced positions": lambda length, width: Block(
        lambda block, x: block.inner(x + block.table[: x.shape[1]]),
        table=_bare(length + 3, width),
        inner=nn.Linear(width, width),
    ),
    "positions by ids": lambda length, width: Block(
        lambda block, x: x + block.table[torch.arange(x.shape[1], device=x.device)], table=_bare(length, width)
    ),
    "where": lambda length, width: Block(lambda block, x: torch.where(x > 0, x, block.scale * x), scale=_bare(width)),
    "in place": lambda length, width: Block(
        _scaled_in_place, scale=_bare(width), table=_bare(length, width), inner=nn.Linear(width, width)
    ),
    "experts": lambda length, width: Block(_experts, weights=_bare(2, width, width), router=nn.Linear(width, 2)),
    "attention bias": lambda length, width: Block(
        lambda block, x: x + (x @ x.mT / 9 + block.bias).softmax(-1) @ x, bias=_bare(length, length)
    ),
    "layer norm": lambda length, width: Block(
        lambda block, x: F.layer_norm(x, (width,), block.weight, block.bias), weight=_bare(width), bias=_bare(width)
    ),
    "used twice": lambda length, width: Block(
        lambda block, x: block.scale * torch.tanh(block.scale + block.inner(x)),
        scale=_bare(width),
        inner=nn.LayerNorm(width),
    ),
    "through a layer": lambda length, width: Block(
        lambda block, x: x * block.inner(block.token), token=_bare(1, 1, width), inner=nn.Linear(width, width)
    ),
}


class MaskedScale(nn.Module):
    """A bare parameter, and an argument (T, T) that all samples share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * self.scale + mask @ x


def _shared_mask(width: int, length: int) -> Block:
    return Block(
        lambda block, x: block.inner(x, block.mask), inner=MaskedScale(width), mask=torch.randn(length, length)
    )


POSITION_IDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "rows": lambda ids, batch: ids.expand(batch, -1),
    "one row": lambda ids, batch: ids[None],
    "no rows": lambda ids, batch: ids,
}


def _position_table(length: int, width: int, rows: str) -> Block:
    """Positions looked up for each sample, once for all as (1, T), or as (T,)."""

    def add(block: Any, x: Tensor) -> Tensor:
        return x + block.table(POSITION_IDS[rows](torch.arange(x.shape[1], device=x.device), len(x)))

    return Block(add, table=nn.Embedding(length, width))


def _table_through_layer(width: int) -> Block:
    """A small table of the model's own, (1, d, d), goes through a layer and is then used by every sample."""
    return Block(
        lambda block, x: x @ block.inner(block.table[None])[0].tanh(),
        table=torch.randn(width, width),
        inner=nn.Linear(width, width),
    )


def _pairs(width: int) -> Block:
    return Block(lambda block, x: block.inner(x, x.flip(1).contiguous()), inner=nn.Bilinear(width, width, width))


def _gated(inner: nn.Module) -> Block:
    """A branch behind a gate that is zero at first."""
    return Block(lambda block, x: x + block.gate * block.inner(x), inner=inner, gate=nn.Parameter(torch.zeros(())))


class Checkpointed(nn.Module):
    enabled = True  # the oracle's autograd.grad cannot go through a reentrant one

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return self.inner(x)
        if not x.requires_grad:  # reentrant checkpoints ask for it
            x = x.detach().requires_grad_()
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@contextmanager
def without_checkpoints() -> Iterator[None]:
    Checkpointed.enabled = False
    try:
        yield
    finally:
        Checkpointed.enabled = True


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def _frozen_batch_norm(width: int) -> nn.Module:
    norm = nn.BatchNorm1d(width).eval()
    norm.running_mean.normal_()
    norm.train = lambda mode=True: norm  # type: ignore[method-assign]
    return transposed(_frozen(norm))


def _divisor(rng: random.Random, number: int) -> int:
    return rng.choice([n for n in range(1, number + 1) if number % n == 0])


Make = Callable[[random.Random, Sizes], nn.Module]

TOKEN_LAYERS: dict[str, Make] = {
    "linear": lambda rng, s: nn.Linear(s.width, s.width, bias=rng.random() < 0.7),
    "mlp": lambda rng, s: nn.Sequential(nn.Linear(s.width, 5), nn.GELU(), nn.Linear(5, s.width)),
    "layer norm": lambda rng, s: nn.LayerNorm(s.width, bias=rng.random() < 0.7),
    "layer norm over (T, d)": lambda rng, s: nn.LayerNorm((s.length, s.width)),
    "rms norm": lambda rng, s: nn.RMSNorm(s.width, eps=1e-5),
    "group norm": lambda rng, s: transposed(nn.GroupNorm(_divisor(rng, s.width), s.width)),
    "instance norm": lambda rng, s: transposed(nn.InstanceNorm1d(s.width, affine=True, eps=0.1)),
    "conv": lambda rng, s: transposed(nn.Conv1d(s.width, s.width, 3, padding=1, groups=_divisor(rng, s.width))),
    "linear over T": lambda rng, s: transposed(nn.Linear(s.length, s.length)),
    "attention": lambda rng, s: _attention(s.width, _divisor(rng, s.width)),
    "torch attention": lambda rng, s: _torch_attention(s.width, _divisor(rng, s.width), s.length),
    "recurrent": lambda rng, s: _recurrent(rng.choice([nn.LSTM, nn.GRU, nn.RNN]), s.width),
    "scale": lambda rng, s: _scale(*rng.choice([(), (s.width,), (1, s.width), (s.length, s.width)])),
    "positions": lambda rng, s: _positions(s.length, s.width),
    "shared mask": lambda rng, s: _shared_mask(s.width, s.length),
    "position table, rows": lambda rng, s: _position_table(s.length, s.width, "rows"),
    "prelu": lambda rng, s: transposed(nn.PReLU(s.width)),
    "bilinear": lambda rng, s: _pairs(s.width),
    "weight norm": lambda rng, s: parametrizations.weight_norm(nn.Linear(s.width, s.width)),
    "frozen batch norm": lambda rng, s: _frozen_batch_norm(s.width),
    **{
        f"own {name}": lambda rng, s, make=make: make(s.length, s.width)  # type: ignore[misc]
        for name, make in OWN_PARAMETERS.items()
    },
    "gaps": lambda rng, s: Block(lambda block, x: torch.stack([x, x], dim=-1)[..., 0]),
    "slice": lambda rng, s: Block(lambda block, x: torch.cat([x, x], dim=1)[:, : x.shape[1]]),
}

# What has its samples elsewhere, or one answer for all of them: exact or refused.
HIDDEN_LAYERS: dict[str, Make] = {
    "time-major linear": lambda rng, s: _time_major(nn.Linear(s.width, s.width)),
    "time-major layer norm": lambda rng, s: _time_major(nn.LayerNorm(s.width)),
    "time-major recurrent": lambda rng, s: _time_major(_recurrent(nn.GRU, s.width, batch_first=False)),
    "flattened linear": lambda rng, s: _flattened(nn.Linear(s.width, s.width)),
    "position table, one row": lambda rng, s: _position_table(s.length, s.width, "one row"),
    "position table, no rows": lambda rng, s: _position_table(s.length, s.width, "no rows"),
    "table through a layer": lambda rng, s: _table_through_layer(s.width),
}

IMAGE_LAYERS: dict[str, Make] = {
    "conv": lambda rng, s: nn.Conv2d(s.width, s.width, 3, padding=1, groups=_divisor(rng, s.width)),
    "pointwise conv": lambda rng, s: nn.Conv2d(s.width, s.width, 1, bias=False),
    "dilated conv": lambda rng, s: nn.Conv2d(s.width, s.width, 3, padding=2, dilation=2),
    "transposed conv": lambda rng, s: nn.ConvTranspose2d(s.width, s.width, 3, padding=1),
    "group norm": lambda rng, s: nn.GroupNorm(_divisor(rng, s.width), s.width),
    "instance norm": lambda rng, s: nn.InstanceNorm2d(s.width, affine=True, eps=0.1),
    "layer norm": lambda rng, s: nn.LayerNorm((s.width, s.side, s.side)),
    "linear over columns": lambda rng, s: nn.Linear(s.side, s.side),
    "scale": lambda rng, s: _scale(s.width, 1, 1),
    "prelu": lambda rng, s: nn.PReLU(s.width),
    "channels last": lambda rng, s: Block(lambda block, x: x.contiguous(memory_format=torch.channels_last)),
    "gaps": lambda rng, s: Block(lambda block, x: torch.stack([x, x], dim=-1)[..., 0]),
}

WRAPPERS: dict[str, Callable[[random.Random, nn.Module], nn.Module]] = {
    "residual": lambda rng, inner: Block(lambda block, x: x + block.inner(x), inner=inner),
    "twice": lambda rng, inner: Block(lambda block, x: block.inner(torch.tanh(block.inner(x))), inner=inner),
    "checkpoint": lambda rng, inner: Checkpointed(inner, reentrant=False),
    "reentrant checkpoint": lambda rng, inner: Checkpointed(inner, reentrant=True),
    "frozen": lambda rng, inner: _frozen(inner),
    "gate": lambda rng, inner: _gated(inner),
}
