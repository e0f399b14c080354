"""Random models, layouts and batch sizes for flash clipping, a pure function of a seed.

A model is a chain of blocks between an input and a loss. Every block treats samples apart, so the oracle (micro-batches
of one) is the truth. Sizes coincide on purpose: sequence length, width, channels and table sizes are often the batch
size. `Case.may_be_refused` says that a block hides its samples (time-major, flattened, shared by the batch): there a
refusal is right too, a wrong result never is.
"""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.blocks import HIDDEN_LAYERS, IMAGE_LAYERS, TOKEN_LAYERS, WRAPPERS, Sizes

CLASSES = 3


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
    memory_budget: str | None
    padding: int = 0  # rows that fill a batch up
    blocks: list[str] = field(default_factory=list)
    may_be_refused: bool = False

    def __str__(self) -> str:
        sizes = [len(labels) for _, labels in self.batches]
        settings = (
            f"{self.loss_reduction}, path {self.path}, clip {self.clipping}, {self.dtype}, "
            f"budget {self.memory_budget}, {self.padding} rows of padding"
        )
        return f"seed {self.seed}: {' > '.join(self.blocks)}; batches of {sizes}; {settings}"


def losses_of(model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
    """(B,): one loss a sample."""
    return model(*batch)


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
        self.entry, self.blocks, self.pool, self.head = entry, nn.Sequential(*blocks), pool, head

    def forward(self, inputs: Any, labels: Tensor) -> Tensor:
        x = inputs["inputs"] if isinstance(inputs, dict | UserDict) else inputs
        return self.losses(self.blocks(self.entry(x)), x, labels)

    def losses(self, x: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        if self.head is None:  # nothing between the last block and the loss: its output gradient is an expanded tensor
            return self.pool(x).sum(-1)
        return F.cross_entropy(self.head(self.pool(x)), labels, reduction="none")


class TiedModel(Model):
    """Next tokens: the head is the input embedding once more."""

    def __init__(self, entry: nn.Embedding, blocks: list[nn.Module]) -> None:
        super().__init__(entry, blocks, TOKEN_POOLS["mean"], nn.Linear(entry.embedding_dim, entry.num_embeddings))
        self.head.weight = entry.weight

    def losses(self, x: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).mT, inputs, reduction="none").mean(1)


def make_case(seed: int, device: str = "cpu") -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    first = rng.randint(1, 8)
    sizes = _sizes(rng, first)
    image = rng.random() < 0.25
    names: list[str] = []
    blocks = [_block(rng, sizes, names, image) for _ in range(rng.randint(1, 4))]
    hidden = any(_is_hidden(block.split(" of ")) for block in names)
    lean = seed % 5 < 2
    if lean:
        blocks = _checkpointed(random.Random(f"checkpoints of {seed}"), blocks, names)
    model, by_ids = _model(rng, sizes, blocks, names, image)
    later = rng.choice([0, 0, 1, 2])
    batch_sizes = [first, *(rng.choice([sizes.length, sizes.width, rng.randint(1, 8)]) for _ in range(later))]
    dtype = rng.choice([torch.float32, torch.float64])
    model = model.to(device, dtype)
    form = rng.choice(["tensor", "tensor", "dict", "user dict"])
    batches = [_batch(size, sizes, image, by_ids, form, device, dtype) for size in batch_sizes]
    if not any(parameter.requires_grad for parameter in model.parameters()):
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
        memory_budget="lean" if lean else None,
        padding=3 if seed % 3 == 0 else 0,
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


def _checkpointed(rng: random.Random, blocks: list[nn.Module], names: list[str]) -> list[nn.Module]:
    """Most blocks in a checkpoint of either kind, or two of them in one."""
    if len(blocks) > 1 and rng.random() < 0.3:
        names[:2] = [f"({names[0]} > {names[1]})"]
        blocks = [nn.Sequential(*blocks[:2]), *blocks[2:]]
    for index, block in enumerate(blocks):
        if rng.random() < 0.8:
            wrapper = rng.choice(["checkpoint", "reentrant checkpoint"])
            blocks[index], names[index] = WRAPPERS[wrapper](rng, block), f"{wrapper} of {names[index]}"
    return blocks


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
