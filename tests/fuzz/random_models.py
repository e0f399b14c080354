"""Random models, layouts and batch sizes for flash clipping, a pure function of a seed.

A model is a chain of blocks between an input and a loss. Every block treats samples apart, so the oracle (micro-batches
of one) is the truth. Sizes coincide on purpose: sequence length, width, channels and table sizes are often the batch
size. `Case.may_be_refused` says that a block hides its samples (time-major, flattened, shared by the batch): there a
refusal is right too, a wrong result never is.
"""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

CLASSES = 3


@dataclass
class Sizes:
    """Of one model: `length` T and `width` d, or an image of `side` with `width` channels."""

    length: int
    width: int
    side: int
    vocabulary: int


@dataclass
class Case:
    """One model, the batches it is trained on in turn, and how."""

    seed: int
    model: nn.Module
    batches: list[tuple[Any, Tensor]]
    loss_reduction: str
    path: str | None
    clipping: str
    dtype: torch.dtype
    blocks: list[str] = field(default_factory=list)
    may_be_refused: bool = False

    def __str__(self) -> str:
        sizes = [len(labels) for _, labels in self.batches]
        settings = f"{self.loss_reduction}, path {self.path}, clip {self.clipping}, {self.dtype}"
        return f"seed {self.seed}: {' > '.join(self.blocks)}; batches of {sizes}; {settings}"


@contextmanager
def without_checkpoints() -> Iterator[None]:
    Checkpointed.enabled = False
    try:
        yield
    finally:
        Checkpointed.enabled = True


def losses_of(model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
    """(B,): one loss a sample."""
    return model(*batch)


# -- blocks on tokens (B, T, d) --------------------------------------------------------------------------------------


class Transposed(nn.Module):
    """A module that works on (B, d, T)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class TimeMajor(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


class Flattened(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.reshape(-1, x.shape[-1])).view(x.shape)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class TorchAttention(nn.Module):
    """nn.MultiheadAttention with a mask (T, T) that all samples share."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, heads, batch_first=True)
        self.register_buffer("mask", torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, x, x, attn_mask=self.mask, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, cls: type[nn.RNNBase], width: int, *, batch_first: bool = True) -> None:
        super().__init__()
        self.inner = cls(width, width, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Scale(nn.Module):
    def __init__(self, *shape: int, start: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(start + 0.1 * torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Positions(nn.Module):
    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class MaskedScale(nn.Module):
    """A bare parameter, and an argument (T, T) that all samples share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * self.scale + mask @ x


class SharedMask(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.inner = MaskedScale(width)
        self.register_buffer("mask", torch.randn(length, length))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, self.mask)


class PositionTable(nn.Module):
    """Positions looked up for each sample, once for all as (1, T), or as (T,)."""

    def __init__(self, length: int, width: int, ids: str) -> None:
        super().__init__()
        self.table, self.ids = nn.Embedding(length, width), ids

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1], device=x.device)
        if self.ids == "rows":
            ids = ids.expand(x.shape[0], -1)
        elif self.ids == "one row":
            ids = ids[None]
        return x + self.table(ids)


class TableThroughLayer(nn.Module):
    """A small table of the model's own, (1, d, d), goes through a layer and is then used by every sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(width, width))
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.inner(self.table[None])[0].tanh()


class Gated(nn.Module):
    """A branch behind a gate that is zero at first."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gate = inner, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * self.inner(x)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


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


class Pairs(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Bilinear(width, width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x.flip(1).contiguous())


class Laid(nn.Module):
    """The same values in another layout: rows with gaps, or channels last."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gaps":
            return torch.stack([x, x], dim=-1)[..., 0]
        if self.kind == "channels last":
            return x.contiguous(memory_format=torch.channels_last)
        return torch.cat([x, x], dim=1)[:, : x.shape[1]]


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def _frozen_batch_norm(width: int) -> nn.Module:
    norm = nn.BatchNorm1d(width).eval()
    norm.running_mean.normal_()
    norm.train = lambda mode=True: norm  # type: ignore[method-assign]
    return Transposed(_frozen(norm))


def _divisor(rng: random.Random, number: int) -> int:
    return rng.choice([n for n in range(1, number + 1) if number % n == 0])


Make = Callable[[random.Random, Sizes], nn.Module]

TOKEN_LAYERS: dict[str, Make] = {
    "linear": lambda rng, s: nn.Linear(s.width, s.width, bias=rng.random() < 0.7),
    "mlp": lambda rng, s: nn.Sequential(nn.Linear(s.width, 5), nn.GELU(), nn.Linear(5, s.width)),
    "layer norm": lambda rng, s: nn.LayerNorm(s.width, bias=rng.random() < 0.7),
    "layer norm over (T, d)": lambda rng, s: nn.LayerNorm((s.length, s.width)),
    "rms norm": lambda rng, s: nn.RMSNorm(s.width, eps=1e-5),
    "group norm": lambda rng, s: Transposed(nn.GroupNorm(_divisor(rng, s.width), s.width)),
    "instance norm": lambda rng, s: Transposed(nn.InstanceNorm1d(s.width, affine=True, eps=0.1)),
    "conv": lambda rng, s: Transposed(nn.Conv1d(s.width, s.width, 3, padding=1, groups=_divisor(rng, s.width))),
    "linear over T": lambda rng, s: Transposed(nn.Linear(s.length, s.length)),
    "attention": lambda rng, s: Attention(s.width, _divisor(rng, s.width)),
    "torch attention": lambda rng, s: TorchAttention(s.width, _divisor(rng, s.width), s.length),
    "recurrent": lambda rng, s: Recurrent(rng.choice([nn.LSTM, nn.GRU, nn.RNN]), s.width),
    "scale": lambda rng, s: Scale(*rng.choice([(), (s.width,), (1, s.width), (s.length, s.width)])),
    "positions": lambda rng, s: Positions(s.length, s.width),
    "shared mask": lambda rng, s: SharedMask(s.width, s.length),
    "position table, rows": lambda rng, s: PositionTable(s.length, s.width, "rows"),
    "prelu": lambda rng, s: Transposed(nn.PReLU(s.width)),
    "bilinear": lambda rng, s: Pairs(s.width),
    "weight norm": lambda rng, s: parametrizations.weight_norm(nn.Linear(s.width, s.width)),
    "frozen batch norm": lambda rng, s: _frozen_batch_norm(s.width),
    "gaps": lambda rng, s: Laid("gaps"),
    "slice": lambda rng, s: Laid("slice"),
}

# What has its samples elsewhere, or one answer for all of them: exact or refused.
HIDDEN_LAYERS: dict[str, Make] = {
    "time-major linear": lambda rng, s: TimeMajor(nn.Linear(s.width, s.width)),
    "time-major layer norm": lambda rng, s: TimeMajor(nn.LayerNorm(s.width)),
    "time-major recurrent": lambda rng, s: TimeMajor(Recurrent(nn.GRU, s.width, batch_first=False)),
    "flattened linear": lambda rng, s: Flattened(nn.Linear(s.width, s.width)),
    "position table, one row": lambda rng, s: PositionTable(s.length, s.width, "one row"),
    "position table, no rows": lambda rng, s: PositionTable(s.length, s.width, "none"),
    "table through a layer": lambda rng, s: TableThroughLayer(s.width),
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
    "scale": lambda rng, s: Scale(s.width, 1, 1),
    "prelu": lambda rng, s: nn.PReLU(s.width),
    "channels last": lambda rng, s: Laid("channels last"),
    "gaps": lambda rng, s: Laid("gaps"),
}

WRAPPERS: dict[str, Callable[[random.Random, nn.Module], nn.Module]] = {
    "residual": lambda rng, inner: Residual(inner),
    "twice": lambda rng, inner: Twice(inner),
    "checkpoint": lambda rng, inner: Checkpointed(inner, reentrant=False),
    "reentrant checkpoint": lambda rng, inner: Checkpointed(inner, reentrant=True),
    "frozen": lambda rng, inner: _frozen(inner),
    "gate": lambda rng, inner: Gated(inner),
}


# -- whole models ----------------------------------------------------------------------------------------------------

TOKEN_POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(1),
    "sum": lambda x: x.sum(1),
    "max": lambda x: x.amax(1),
    "first": lambda x: x[:, 0],
    "every second": lambda x: x[:, ::2].sum(1),
}
IMAGE_POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean((2, 3)),
    "sum": lambda x: x.sum((2, 3)),
    "max": lambda x: x.amax((2, 3)),
    "corner": lambda x: x[:, :, 0, -1],
}


class Model(nn.Module):
    """Input, blocks, pooling, loss: forward gives (B,) losses."""

    def __init__(
        self, entry: nn.Module, blocks: list[nn.Module], pool: Callable[[Tensor], Tensor], head: nn.Module | None
    ) -> None:
        super().__init__()
        self.entry, self.blocks, self.head = entry, nn.ModuleList(blocks), head
        self.pool = pool

    def forward(self, inputs: Any, labels: Tensor) -> Tensor:
        x = inputs["inputs"] if isinstance(inputs, dict | UserDict) else inputs
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        if self.head is None:  # nothing between the last block and the loss: its output gradient is an expanded tensor
            return self.pool(x).sum(-1)
        return F.cross_entropy(self.head(self.pool(x)), labels, reduction="none")


class TiedModel(Model):
    """Next tokens: the head is the input embedding once more."""

    def __init__(self, entry: nn.Embedding, blocks: list[nn.Module]) -> None:
        super().__init__(entry, blocks, TOKEN_POOLS["mean"], nn.Linear(entry.embedding_dim, entry.num_embeddings))
        self.head.weight = entry.weight

    def forward(self, inputs: Any, labels: Tensor) -> Tensor:
        ids = inputs["inputs"] if isinstance(inputs, dict | UserDict) else inputs
        x = self.entry(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).mT, ids, reduction="none").mean(1)


def make_case(seed: int, device: str = "cpu") -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    first = rng.randint(1, 8)
    sizes = _sizes(rng, first)
    image = rng.random() < 0.25
    names: list[str] = []
    blocks = [_block(rng, sizes, names, image) for _ in range(rng.randint(1, 4))]
    hidden = any(_is_hidden(block.split(" of ")) for block in names)
    model, by_ids = _model(rng, sizes, blocks, names, image)
    later = rng.choice([0, 0, 1, 2])
    batch_sizes = [first, *(rng.choice([sizes.length, sizes.width, rng.randint(1, 8)]) for _ in range(later))]
    dtype = rng.choice([torch.float32, torch.float64])
    model = model.to(device, dtype)
    form = rng.choice(["tensor", "tensor", "dict", "user dict"])
    batches = [_batch(size, sizes, image, by_ids, form, device, dtype) for size in batch_sizes]
    trained = any(parameter.requires_grad for parameter in model.parameters())
    if not trained:
        model.requires_grad_(True)
    return Case(
        seed=seed,
        model=model,
        batches=batches,
        loss_reduction=rng.choice(["mean", "sum"]),
        # Gram norms in float32 are over-estimated on purpose where positions cancel (docs/flash.md).
        path=rng.choice([None, None, "gram" if dtype == torch.float64 else "keep", "direct", "keep"]),
        clipping=rng.choice(["all", "some", "none"]),
        dtype=dtype,
        blocks=names,
        may_be_refused=hidden,
    )


def _is_hidden(parts: list[str]) -> bool:
    """Also a reentrant checkpoint inside a module with a parameter of its own: it runs where vmap is over."""
    return parts[-1] in HIDDEN_LAYERS or ("gate" in parts and "reentrant checkpoint" in parts[parts.index("gate") :])


def _sizes(rng: random.Random, batch: int) -> Sizes:
    def size(low: int, high: int) -> int:
        return batch if rng.random() < 0.35 and low <= batch <= high else rng.randint(low, high)

    return Sizes(length=size(2, 8), width=size(2, 8), side=size(3, 6), vocabulary=size(4, 12))


def _block(rng: random.Random, sizes: Sizes, names: list[str], image: bool) -> nn.Module:
    tokens = HIDDEN_LAYERS if rng.random() < 0.12 else TOKEN_LAYERS
    table = IMAGE_LAYERS if image else tokens
    name = rng.choice(list(table))
    # torch 2.13 on a CPU: a lone sample's instance norm gets a channels-last gradient wrong (docs/sharp-edges.md).
    clash = {"channels last": "instance norm", "instance norm": "channels last"}
    if image and name in clash and any(clash[name] in earlier for earlier in names):
        name = "gaps"
    block = table[name](rng, sizes)
    while rng.random() < 0.3:
        wrapper = rng.choice(list(WRAPPERS))
        if wrapper == "frozen" and not any(True for _ in block.parameters()):
            continue
        block, name = WRAPPERS[wrapper](rng, block), f"{wrapper} of {name}"
    names.append(name)
    return block


def _model(
    rng: random.Random, sizes: Sizes, blocks: list[nn.Module], names: list[str], image: bool
) -> tuple[nn.Module, bool]:
    if image:
        pool = rng.choice(list(IMAGE_POOLS))
        head = nn.Linear(sizes.width, CLASSES) if rng.random() < 0.6 else None
        names[:] = ["image", *names, pool, "head" if head else "no head"]
        return Model(nn.Conv2d(2, sizes.width, 3, padding=1), blocks, IMAGE_POOLS[pool], head), False
    by_ids = rng.random() < 0.6
    entry: nn.Module = nn.Linear(3, sizes.width)
    if by_ids:
        entry = nn.Embedding(sizes.vocabulary, sizes.width, padding_idx=rng.choice([None, 0]))
        if rng.random() < 0.3:
            names[:] = ["ids", *names, "tied head"]
            return TiedModel(entry, blocks), True
    pool = rng.choice(list(TOKEN_POOLS))
    head = nn.Linear(sizes.width, CLASSES) if rng.random() < 0.7 else None
    names[:] = ["ids" if by_ids else "floats", *names, pool, "head" if head else "no head"]
    return Model(entry, blocks, TOKEN_POOLS[pool], head), by_ids


def _batch(
    size: int, sizes: Sizes, image: bool, by_ids: bool, form: str, device: str, dtype: torch.dtype
) -> tuple[Any, Tensor]:
    if image:
        inputs = torch.randn(size, 2, sizes.side, sizes.side)
    elif by_ids:
        inputs = torch.randint(sizes.vocabulary, (size, sizes.length))
    else:
        inputs = torch.randn(size, sizes.length, 3)
    inputs = inputs.to(device, dtype if inputs.is_floating_point() else None)
    labels = torch.randint(CLASSES, (size,)).to(device)
    wrapped = {"tensor": inputs, "dict": {"inputs": inputs}, "user dict": UserDict(inputs=inputs)}[form]
    return wrapped, labels
