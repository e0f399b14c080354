"""Layers that are not what their class says, on tokens (B, T, d): every block treats samples apart.

overridden  subclasses with another forward, _conv_forward, weight, __getattr__, …; instances with methods of their own
hooked      forward hooks and pre-hooks that change what goes in and comes out
derived     weights that are made of parameters: standardised, parametrized, pruned, tied by hand
recurrent   LSTM, GRU and RNN with layers, directions, projections, states that are learned
keeping     modules that keep something of no sample from step to step
"""

from __future__ import annotations

import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.fuzz.blocks import Block, Make, Sizes, transposed

EFFECTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "scaled": lambda y: y * 1.7,
    "shifted": lambda y: y + 0.3,
    "swish": lambda y: y * y.sigmoid(),
}


def _base(rng: random.Random, s: Sizes) -> tuple[type[nn.Module], tuple[Any, ...], dict[str, Any]]:
    """A layer's class on (B, d, T) or (B, T, d), with its arguments."""
    return rng.choice(
        [
            (nn.Linear, (s.width, s.width), {}),
            (nn.LayerNorm, (s.width,), {}),
            (nn.RMSNorm, (s.width,), {"eps": 1e-5}),
            (nn.Conv1d, (s.width, s.width, 3), {"padding": 1}),
            (nn.GroupNorm, (1, s.width), {}),
            (nn.InstanceNorm1d, (s.width,), {"affine": True, "eps": 0.1}),
        ]
    )


def _placed(layer: nn.Module) -> nn.Module:
    """Layers over channels get (B, d, T)."""
    return transposed(layer) if isinstance(layer, (nn.Conv1d, nn.GroupNorm, nn.InstanceNorm1d)) else layer


def _subclass(cls: type[nn.Module], **methods: Any) -> type[nn.Module]:
    return type(f"Odd{cls.__name__}", (cls,), methods)


def _forward_after(rng: random.Random, s: Sizes) -> nn.Module:
    cls, args, kwargs = _base(rng, s)
    effect = EFFECTS[rng.choice(list(EFFECTS))]
    return _placed(_subclass(cls, forward=lambda self, x: effect(cls.forward(self, x)))(*args, **kwargs))


def _forward_before(rng: random.Random, s: Sizes) -> nn.Module:
    cls, args, kwargs = _base(rng, s)
    effect = EFFECTS[rng.choice(list(EFFECTS))]
    return _placed(_subclass(cls, forward=lambda self, x: cls.forward(self, effect(x)))(*args, **kwargs))


def _forward_twice(rng: random.Random, s: Sizes) -> nn.Module:
    cls, args, kwargs = _base(rng, s)
    return _placed(
        _subclass(cls, forward=lambda self, x: cls.forward(self, cls.forward(self, x).tanh()))(*args, **kwargs)
    )


def _other_call(rng: random.Random, s: Sizes) -> nn.Module:
    cls, args, kwargs = _base(rng, s)
    effect = EFFECTS[rng.choice(list(EFFECTS))]
    return _placed(_subclass(cls, __call__=lambda self, x: effect(nn.Module.__call__(self, x)))(*args, **kwargs))


def _conv_forward(rng: random.Random, s: Sizes) -> nn.Module:
    effect = EFFECTS[rng.choice(list(EFFECTS))]
    on_weight = rng.random() < 0.5

    def forward(self: nn.Conv1d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if on_weight:
            return nn.Conv1d._conv_forward(self, x, effect(weight), bias)
        return effect(nn.Conv1d._conv_forward(self, x, weight, bias))

    return transposed(_subclass(nn.Conv1d, _conv_forward=forward)(s.width, s.width, 3, padding=1))


def _instance_norm(rng: random.Random, s: Sizes) -> nn.Module:
    effect = EFFECTS[rng.choice(list(EFFECTS))]

    def apply(self: nn.InstanceNorm1d, x: Tensor) -> Tensor:
        return effect(nn.InstanceNorm1d._apply_instance_norm(self, x))

    return transposed(_subclass(nn.InstanceNorm1d, _apply_instance_norm=apply)(s.width, affine=True, eps=0.1))


def _weight_property(rng: random.Random, s: Sizes) -> nn.Module:
    """The weight is a property that is made of another parameter."""
    cls, args, kwargs = _base(rng, s)
    key = rng.choice(["weight", "bias"]) if cls is not nn.RMSNorm else "weight"
    effect = EFFECTS[rng.choice(list(EFFECTS))]
    layer = cls(*args, **kwargs)
    raw = layer._parameters.pop(key)
    layer.register_parameter(f"raw_{key}", raw)
    layer.__class__ = _subclass(cls, **{key: property(lambda self: effect(self._parameters[f"raw_{key}"]))})
    return _placed(layer)


def _getattr(rng: random.Random, s: Sizes) -> nn.Module:
    cls, args, kwargs = _base(rng, s)

    def get(self: nn.Module, name: str) -> Any:
        found = nn.Module.__getattr__(self, name)
        return found * 3 if name == "weight" else found

    layer = cls(*args, **kwargs)
    layer.__class__ = _subclass(cls, __getattr__=get)
    return _placed(layer)


def _getattribute(rng: random.Random, s: Sizes) -> nn.Module:
    cls, args, kwargs = _base(rng, s)

    def get(self: nn.Module, name: str) -> Any:
        if name == "weight":
            return self._parameters["weight"].tanh()
        return object.__getattribute__(self, name)

    layer = cls(*args, **kwargs)
    layer.__class__ = _subclass(cls, __getattribute__=get)
    return _placed(layer)


def _own_forward(rng: random.Random, s: Sizes) -> nn.Module:
    """An instance whose forward is its own."""
    cls, args, kwargs = _base(rng, s)
    effect = EFFECTS[rng.choice(list(EFFECTS))]
    layer = cls(*args, **kwargs)
    layer.forward = types.MethodType(lambda self, x: effect(cls.forward(self, x)), layer)
    return _placed(layer)


def _own_conv_forward(rng: random.Random, s: Sizes) -> nn.Module:
    layer = nn.Conv1d(s.width, s.width, 3, padding=1)
    layer._conv_forward = lambda x, weight, bias: F.conv1d(x, weight.tanh(), bias, padding=1).relu()
    return transposed(layer)


def _hooked(rng: random.Random, s: Sizes) -> nn.Module:
    cls, args, kwargs = _base(rng, s)
    effect = EFFECTS[rng.choice(list(EFFECTS))]
    layer = cls(*args, **kwargs)
    if rng.random() < 0.5:
        layer.register_forward_hook(lambda module, args, y: effect(y))
    else:
        layer.register_forward_pre_hook(lambda module, args: (effect(args[0]),))
    return _placed(layer)


def _functional(rng: random.Random, s: Sizes) -> nn.Module:
    """A layer whose parameters the parent uses by hand, beside calling it."""
    twice = rng.random() < 0.5

    def run(block: Any, x: Tensor) -> Tensor:
        y = F.linear(x, block.inner.weight.tanh(), block.inner.bias)
        return y + block.inner(x) if twice else y

    return Block(run, inner=nn.Linear(s.width, s.width))


# -- derived weights


class StandardisedConv(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2), keepdim=True)) / (w.std((1, 2), keepdim=True) + 1e-3)
        return self._conv_forward(x, w, self.bias)


class ByBatchNorm(nn.Conv1d):
    """timm's weight standardisation."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, eps=1e-3).reshape_as(self.weight)
        return F.conv1d(x, weight, self.bias, padding=self.padding)


class Squashed(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.tanh() + 0.1 * w.mean(0, keepdim=True)


class Added(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.delta = nn.Parameter(0.1 * torch.randn(shape))

    def forward(self, w: Tensor) -> Tensor:
        return w + self.delta


def _parametrized(rng: random.Random, s: Sizes) -> nn.Module:
    layer = rng.choice([nn.Linear(s.width, s.width), nn.Conv1d(s.width, s.width, 3, padding=1)])
    kind = rng.choice(["squashed", "added", "both", "weight norm", "orthogonal", "bias"])
    if kind in ("squashed", "both"):
        parametrize.register_parametrization(layer, "weight", Squashed())
    if kind in ("added", "both"):
        parametrize.register_parametrization(layer, "weight", Added(layer.weight.shape))
    if kind == "weight norm":
        parametrizations.weight_norm(layer)
    if kind == "orthogonal" and isinstance(layer, nn.Linear):
        parametrizations.orthogonal(layer)
    if kind == "bias":
        parametrize.register_parametrization(layer, "bias", Added(layer.bias.shape))
    return _placed(layer)


def _old_style(rng: random.Random, s: Sizes) -> nn.Module:
    layer = rng.choice([nn.Linear(s.width, s.width), nn.Conv1d(s.width, s.width, 3, padding=1)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        kind = rng.choice(["weight norm", "spectral norm", "prune"])
        if kind == "weight norm":
            layer = torch.nn.utils.weight_norm(layer)
        elif kind == "spectral norm":
            layer = torch.nn.utils.spectral_norm(layer).eval()
            layer.train = lambda mode=True: layer  # its power iteration would move the weight
        else:
            layer = prune.l1_unstructured(layer, "weight", 0.4)
    return _placed(layer)


# -- recurrent


def _stack(rng: random.Random, s: Sizes) -> nn.Module:
    cls = rng.choice([nn.LSTM, nn.GRU, nn.RNN])
    options: dict[str, Any] = {"num_layers": rng.choice([1, 2]), "bidirectional": rng.random() < 0.4}
    options["bias"] = rng.random() < 0.7
    options["batch_first"] = first = rng.random() < 0.7
    if cls is nn.LSTM and s.width > 2 and rng.random() < 0.3:
        options["proj_size"] = s.width - 1
    if cls is nn.RNN:
        options["nonlinearity"] = rng.choice(["tanh", "relu"])
    inner = cls(s.width, s.width, **options)
    size = options.get("proj_size", s.width) * (1 + options["bidirectional"])
    effect = EFFECTS[rng.choice(list(EFFECTS))] if rng.random() < 0.3 else None
    if effect is not None:
        inner.__class__ = _subclass(cls, forward=lambda self, x: (effect(cls.forward(self, x)[0]), None))

    def run(block: Any, x: Tensor) -> Tensor:
        y = block.inner(x if first else x.transpose(0, 1))[0]
        return block.out(y if first else y.transpose(0, 1))

    return Block(run, inner=inner, out=nn.Linear(size, s.width))


def _learned_state(rng: random.Random, s: Sizes) -> nn.Module:
    def run(block: Any, x: Tensor) -> Tensor:
        return block.inner(x, block.start.expand(-1, len(x), -1).contiguous())[0]

    start = nn.Parameter(torch.randn(1, 1, s.width))
    return Block(run, inner=nn.GRU(s.width, s.width, batch_first=True), start=start)


def _cell(rng: random.Random, s: Sizes) -> nn.Module:
    def run(block: Any, x: Tensor) -> Tensor:
        h, outputs = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = block.inner(x[:, t], h)
            outputs.append(h)
        return torch.stack(outputs, 1)

    return Block(run, inner=nn.GRUCell(s.width, s.width))


# -- state of no sample


def _counter(rng: random.Random, s: Sizes) -> nn.Module:
    """Counts its calls, in an attribute, a list or a dictionary, and does not use them."""
    where = rng.choice(["attribute", "list", "dict"])

    def run(block: Any, x: Tensor) -> Tensor:
        if where == "attribute":
            block.calls += 1
        elif where == "list":
            block.items.append(len(block.items))
        else:
            block.table["calls"] = block.table.get("calls", 0) + 1
        return block.inner(x)

    block = Block(run, inner=nn.Linear(s.width, s.width))
    block.calls, block.items, block.table = 0, [], {}
    return block


def _cache(rng: random.Random, s: Sizes) -> nn.Module:
    """Keeps a table of positions, made at the first call."""

    def run(block: Any, x: Tensor) -> Tensor:
        if block.table is None or block.table.shape[0] != x.shape[1] or block.table.dtype != x.dtype:
            block.table = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None].sin()
        return block.inner(x + block.table)

    block = Block(run, inner=nn.Linear(s.width, s.width))
    block.table = None
    return block


def _note(rng: random.Random, s: Sizes) -> nn.Module:
    """Keeps what it gave, and never reads it: as models do that let users look at their attention."""

    def run(block: Any, x: Tensor) -> Tensor:
        y = block.inner(x)
        block.last = y.detach()
        return y

    return Block(run, inner=nn.LayerNorm(s.width))


def _dropout(rng: random.Random, s: Sizes) -> nn.Module:
    return nn.Sequential(nn.Linear(s.width, s.width), nn.Dropout(0.0))


def _quantised(rng: random.Random, s: Sizes) -> nn.Module:
    """An embedding subclass, given ids that are made of activations."""
    effect = EFFECTS[rng.choice(list(EFFECTS))]
    table = _subclass(nn.Embedding, forward=lambda self, ids: effect(nn.Embedding.forward(self, ids)))(9, s.width)
    return Block(lambda block, x: x + block.table(x.detach().abs().sum(-1).mul(3).long().clamp(max=8)), table=table)


def _one_by_one(rng: random.Random, s: Sizes) -> nn.Module:
    """Gives its layer one sample after the other."""
    how = rng.choice(["rows", "slices", "pieces"])

    def run(block: Any, x: Tensor) -> Tensor:
        if how == "rows":
            return torch.stack([block.inner(row) for row in x])
        return torch.cat([block.inner(piece) for piece in x.split(1 if how == "slices" else 2)])

    return Block(run, inner=nn.Sequential(nn.Linear(s.width, s.width), nn.LayerNorm(s.width)))


def _own_gradient(rng: random.Random, s: Sizes) -> nn.Module:
    """Adds the gradient of an energy of its input."""
    how = rng.choice(["autograd", "func", "detached"])

    def run(block: Any, x: Tensor) -> Tensor:
        if how == "func":
            return x + torch.func.grad(lambda v: block.inner(v).tanh().square().sum())(x)
        given = x if x.requires_grad else x.detach().requires_grad_()
        with torch.enable_grad():
            energy = block.inner(given).tanh().square().sum()
            (force,) = torch.autograd.grad(energy, given, create_graph=how == "autograd")
        return x + (force if how == "autograd" else block.inner(x) * force)

    return Block(run, inner=nn.Linear(s.width, s.width))


def _writes(rng: random.Random, s: Sizes) -> nn.Module:
    """Clips its own weights in forward."""
    how = rng.choice(["no_grad", "data", "assigned"])

    def run(block: Any, x: Tensor) -> Tensor:
        weight = block.inner.weight
        if how == "no_grad":
            with torch.no_grad():
                weight.clamp_(-0.2, 0.2)
        elif how == "data":
            weight.data.clamp_(-0.2, 0.2)
        else:
            weight.data = weight.data.clamp(-0.2, 0.2)
        return block.inner(x)

    return Block(run, inner=nn.Linear(s.width, s.width))


ODD_LAYERS: dict[str, Make] = {
    "forward, changed after": _forward_after,
    "forward, changed before": _forward_before,
    "forward, twice": _forward_twice,
    "__call__": _other_call,
    "_conv_forward": _conv_forward,
    "_apply_instance_norm": _instance_norm,
    "weight property": _weight_property,
    "__getattr__": _getattr,
    "__getattribute__": _getattribute,
    "forward of an instance": _own_forward,
    "_conv_forward of an instance": _own_conv_forward,
    "hooks": _hooked,
    "weight used by hand": _functional,
    "standardised conv": lambda rng, s: transposed(StandardisedConv(s.width, s.width, 3, padding=1)),
    "standardised by batch_norm": lambda rng, s: transposed(ByBatchNorm(s.width, s.width, 3, padding=1)),
    "parametrized": _parametrized,
    "old-style derived": _old_style,
    "recurrent stack": _stack,
    "learned state": _learned_state,
    "cell": _cell,
    "counter": _counter,
    "cache": _cache,
    "note": _note,
    "dropout": _dropout,
    "embedding subclass": _quantised,
    "one by one": _one_by_one,
    "own gradient": _own_gradient,
    "writes its weights": _writes,
}
