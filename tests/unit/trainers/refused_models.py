"""Models that Opacus's methods meet in the field, as workloads of four samples: what they train and what not."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope import Workload

BATCH, LENGTH, WIDTH, WORDS = 4, 6, 8, 10


def features(seed: int, device: Any) -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)


def tokens(seed: int, device: Any) -> Tensor:
    return torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed)).to(device)


def named(seed: int, device: Any) -> dict[str, Tensor]:
    return {"x": features(seed, device), "mask": (features(seed + 1, device) > 0).float()}


def encoded(seed: int, device: Any) -> UserDict[str, Tensor]:
    return UserDict(named(seed, device))


def per_sample(output: Tensor) -> Tensor:
    return output.flatten(1).square().mean(1)


class Layers(nn.Module):
    """Two Linears; subclasses say what else there is and how it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.add()

    def add(self) -> None: ...


class Positions(Layers):
    """A bare parameter at the root."""

    def add(self) -> None:
        self.positions = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x + self.positions))


def between(layer: Callable[[], nn.Module]) -> type[Layers]:
    """A model with a layer between the two Linears."""

    class Between(Layers):
        def add(self) -> None:
            self.middle = layer()

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            given = (h, h, h) if isinstance(self.middle, nn.MultiheadAttention) else (h,)
            output = self.middle(*given)
            return self.last(output[0] if isinstance(output, tuple) else output)

    return Between


def calling(forward: Callable[..., Any], base: type[Layers] = Positions) -> type[Layers]:
    return type("Model", (base,), {"forward": forward})


def with_mask(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    h = self.first(x + self.positions)
    return self.last(h if mask is None else h * mask)


def with_switch(self: Any, x: Tensor, rectify: bool = False) -> Tensor:
    h = self.first(x + self.positions)
    return self.last(h.relu() if rectify else h)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("offset", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.offset


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids) + self.places(self.ids(ids)))

    def ids(self, ids: Tensor) -> Tensor:
        return torch.arange(LENGTH).expand(ids.shape).contiguous()


class TiedWords(Words):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.words.weight


class Bags(Words):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).unsqueeze(1) + self.places(self.ids(ids)))


@dataclass
class Output:
    logits: Tensor


def workload(
    model: Callable[[], nn.Module],
    batch: Callable[[int, Any], Any] = features,
    call: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(batch),
) -> Workload:
    return Workload(model=model, batch=batch, loss=lambda model, batch: per_sample(call(model, batch)))


def plain(self: Any, x: Tensor) -> Tensor:
    return self.last(self.first(x))


def sequence_first(self: Any, x: Tensor) -> Tensor:
    return self.last(self.first(x.transpose(0, 1))).transpose(0, 1)


def adding_in_place(self: Any, x: Tensor) -> Tensor:
    h = self.first(x)
    h += x
    return self.last(h)


def choosing(self: Any, x: Tensor) -> Tensor:
    h = self.first(x + self.positions)
    return self.last(h * 2 if h.sum() > 0 else h)


def in_evaluation() -> nn.Module:
    model = calling(plain, Layers)()
    model.first.eval()
    return model


WORKS = {
    "a dictionary": workload(calling(lambda self, d: plain(self, d["x"]), Layers), named),
    "keywords": workload(calling(lambda self, *, x, mask: plain(self, x * mask), Layers), named, lambda m, d: m(**d)),
    "a tokenizer's dictionary": workload(calling(lambda self, d: plain(self, d["x"]), Layers), encoded),
    "a dataclass given back": workload(
        calling(lambda self, x: Output(plain(self, x)), Layers), call=lambda m, x: m(x).logits
    ),
    "a tuple given back": workload(calling(lambda self, x: (plain(self, x), x), Layers), call=lambda m, x: m(x)[0]),
    "a bare parameter": workload(Positions),
    "a switch that repeats the default": workload(calling(with_switch), call=lambda m, x: m(x, rectify=False)),
    "a mask that hides nothing": workload(calling(with_mask), call=lambda m, x: m(x, torch.ones_like(x))),
}

# What -> workload, methods that cannot train it, what the sentence says (a regular expression).
BOTH = ("flat", "ghost")
REFUSED: dict[str, tuple[Workload, tuple[str, ...], str]] = {
    "MultiheadAttention": (
        workload(between(lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True))),
        BOTH,
        r"refuses this model: middle \(MultiheadAttention\): We do not support nn.MultiheadAttention.*fix\(model\)",
    ),
    "LSTM": (
        workload(between(lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))),
        BOTH,
        r"Opacus refuses this model: middle \(LSTM\): We do not support nn.LSTM",
    ),
    "RNN": (workload(between(lambda: nn.RNN(WIDTH, WIDTH, batch_first=True))), BOTH, r"use opacus.layers.DPRNN"),
    "BatchNorm": (workload(between(lambda: nn.BatchNorm1d(LENGTH))), BOTH, r"middle is BatchNorm1d, use nn.GroupNorm"),
    "tied weights": (
        workload(TiedWords, tokens),
        ("ghost",),
        r"Parameter tying is not supported.*\(at head \(Linear\)",
    ),
    "a buffer": (
        workload(between(Scaled)),
        BOTH,
        r"middle \(Scaled\) holds the buffer offset.*submodule without buffers",
    ),
    "LayerNorm without bias": (
        workload(between(lambda: nn.LayerNorm(WIDTH, bias=False))),
        BOTH,
        r"make it with bias=True",
    ),
    "EmbeddingBag": (workload(Bags, tokens), BOTH, r"words \(EmbeddingBag\) is called without offsets"),
    "a dictionary for a bare parameter": (
        workload(calling(lambda self, d: self.last(self.first(d["x"] + self.positions))), named),
        BOTH,
        r"the model itself \(Model\) owns parameters and is given a dict,.*submodule that takes one tensor",
    ),
    "a tokenizer's dictionary for a bare parameter": (
        workload(calling(lambda self, d: self.last(self.first(d["x"] + self.positions))), encoded),
        BOTH,
        r"is given a UserDict",
    ),
    "a keyword for a bare parameter": (
        workload(Positions, call=lambda m, x: m(x=x)),
        BOTH,
        r"is given x by keyword.*by position",
    ),
    "a keyword-only input for a bare parameter": (
        workload(calling(lambda self, *, x: Positions.forward(self, x)), call=lambda m, x: m(x=x)),
        BOTH,
        r"is given x by keyword.*submodule that takes one tensor",
    ),
    "a mask that Opacus would leave out": (
        workload(calling(with_mask), named, lambda m, d: m(d["x"], d["mask"])),
        BOTH,
        r"from its first argument alone, without argument 2",
    ),
    "a mask by keyword": (
        workload(calling(with_mask), named, lambda m, d: m(d["x"], mask=d["mask"])),
        BOTH,
        r"from its first argument alone, without mask",
    ),
    "a switch": (workload(calling(with_switch), call=lambda m, x: m(x, rectify=True)), BOTH, r"alone, without rectify"),
    "a tuple of a bare parameter": (
        workload(calling(lambda self, x: (Positions.forward(self, x), x)), call=lambda m, x: m(x)[0]),
        BOTH,
        r"returns a tuple, where Opacus's hooks need one tensor",
    ),
    "a dataclass of a bare parameter": (
        workload(calling(lambda self, x: Output(Positions.forward(self, x))), call=lambda m, x: m(x).logits),
        BOTH,
        r"returns a Output, where Opacus's hooks need one tensor",
    ),
    "positions for all samples at once": (
        workload(type("Shared", (Words,), {"ids": lambda self, ids: torch.arange(LENGTH)[None]}), tokens),
        BOTH,
        r"places \(Embedding\) was given a tensor of shape \(1, 6\) in a batch of 4 samples",
    ),
    "expanded positions": (
        workload(type("Expanded", (Words,), {"ids": lambda self, ids: torch.arange(LENGTH).expand(ids.shape)}), tokens),
        ("ghost",),
        r"places \(Embedding\) is given a tensor that is not contiguous",
    ),
    "a folded batch": (
        workload(calling(lambda self, x: plain(self, x.reshape(-1, WIDTH)).view(x.shape), Layers)),
        BOTH,
        r"first \(Linear\) was given a tensor of shape \(24, 8\) in a batch of 4 samples",
    ),
    "the sequence first": (workload(calling(sequence_first, Layers)), BOTH, r"of shape \(6, 4, 8\) in a batch of 4"),
    "a layer that is not used": (
        workload(calling(lambda self, x: self.first(x), Layers)),
        BOTH,
        r"no per-sample gradient reaches last.weight, last.bias",
    ),
    "a weight used outside its layer": (
        workload(calling(lambda self, x: F.linear(self.first(x), self.last.weight, self.last.bias), Layers)),
        BOTH,
        r"no per-sample gradient reaches last.weight, last.bias",
    ),
    "a bare parameter that is not used": (
        workload(calling(plain)),
        ("ghost",),
        r"no per-sample gradient reaches positions",
    ),
    "a keyword for a layer": (
        workload(calling(lambda self, x: self.last(input=self.first(x)), Layers)),
        BOTH,
        r"last \(Linear\) owns parameters and is given input by keyword.*pass it by position",
    ),
    "an operation in place": (workload(calling(adding_in_place, Layers)), BOTH, r"in place.*write h = h \+ x"),
    "control flow that vmap cannot follow": (
        workload(calling(choosing)),
        BOTH,
        r"no rule for the model itself \(Model\) and runs it through torch.func.vmap, which cannot follow it \(Runt",
    ),
    "a layer in evaluation mode": (workload(in_evaluation), BOTH, r"first \(Linear\) is in evaluation mode"),
}
