"""Per-sample gradients of operators that use a bare parameter: by rule for the common ones, row by row for any other.

A rule receives the use, g: (B, ...), and the operator's arguments, in which parameters are `Operand`s. It returns
(operand, (B, *operand's shape)) for each, or None if it does not know the form of the call. A product or a lookup of a
parameter itself goes to the engine unchanged, like a layer's. `RULES` says as well whether other operands are needed in
backward; those that are not are given by their shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.functional import pad as pad_zeros  # torch's own, whatever F.pad becomes
from torch.utils import _pytree as pytree

from dpscope.flash.gradients.contributions import sample_products, wide
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.kernels.sample_sums import bias_sums, layer_norm_sums
from dpscope.flash.layers.conv import add_patches, patches_of, setting_of
from dpscope.flash.layers.embedding import add_lookup, lookup_of
from dpscope.flash.layers.linear import as_sequences, keep_or_defer
from dpscope.flash.taps.taps import TapOfSamples


class Operand(NamedTuple):
    """A tensor that is made of parameters alone, with its history."""

    plain: Tensor


class Flat(NamedTuple):
    """The form of a call whose arguments hold no tensors inside of others."""

    positional: int
    names: tuple[str, ...]


_CONTAINERS = frozenset((list, tuple, dict))
_flat = lru_cache(256)(Flat)
_PLAIN = (int, float, str, slice, type(None), type(...), torch.dtype)


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the arguments of a call as a list, and its form. Most calls need no walk through containers."""
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        if type(leaf) in _CONTAINERS and not all(isinstance(part, _PLAIN) for part in leaf):
            return pytree.tree_flatten((args, kwargs))
    return leaves, _flat(len(args), tuple(kwargs))


def key_of(form: Any) -> Any:
    """Return a hashable key of a form. Up to 2.7 torch's own forms cannot be hashed."""
    return form if type(form) is Flat else repr(form)


def rebuild(leaves: list[Any], form: Any) -> tuple[Any, Any]:
    """Return args and kwargs of a call that was flattened."""
    if type(form) is Flat:
        if not form.names:
            return leaves, {}
        return leaves[: form.positional], dict(zip(form.names, leaves[form.positional :], strict=True))
    args, kwargs = pytree.tree_unflatten(leaves, form)
    return args, kwargs


class Use(Protocol):
    """An operator that uses a parameter (bare_use.py)."""

    func: Any
    rows: list[bool]

    @property
    def tap(self) -> TapOfSamples: ...


def slot_of(tap: TapOfSamples, tensor: Tensor | None) -> Slot | None:
    """Return the slot of a parameter, whichever module owns it; modules may pass parameters to each other."""
    return tap.engine.slot(tensor) if isinstance(tensor, nn.Parameter) else None


Gradients = list[tuple[Operand, Any]]  # (B, *shape) tensors, or the Patches of a convolution


def _reduced(g: Tensor, shape: torch.Size) -> Tensor:
    """Sum g over the dimensions that a tensor of `shape` was broadcast over, except rows: (B, ...) -> (B, *shape)."""
    batch = g.shape[0]
    lead = g.dim() - len(shape)
    if lead == 0:  # the parameter has a leading dimension of 1
        g, lead = g.unsqueeze(1), 1
    dims = [*range(1, lead), *(lead + i for i, n in enumerate(shape) if n == 1 and g.shape[lead + i] > 1)]
    if dims:
        g = g.sum(dims, dtype=wide(g.dtype))
    return g.reshape(batch, *shape)


def _of_add(use: Use, g: Tensor, args: Any, kwargs: Any) -> Gradients | None:
    if kwargs or len(args) != 2:
        return None
    operand = args[0] if isinstance(args[0], Operand) else args[1]
    return [(operand, _reduced(g, operand.plain.shape))]


def _of_sub(use: Use, g: Tensor, args: Any, kwargs: Any) -> Gradients | None:
    found = _of_add(use, g, args, kwargs)
    return found if found is None or isinstance(args[0], Operand) else [(found[0][0], -found[0][1])]


def _of_mul(use: Use, g: Tensor, args: Any, kwargs: Any) -> Gradients | None:
    if kwargs or len(args) != 2:
        return None
    operand, other = args if isinstance(args[0], Operand) else args[::-1]
    if not isinstance(other, Tensor):
        return None
    return [(operand, _reduced(g.to(wide(g.dtype)) * other, operand.plain.shape))]


def _of_cat(use: Use, g: Tensor, args: Any, kwargs: Any) -> Gradients | None:
    tensors = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    dim, start, found = dim % g.dim(), 0, []
    for tensor in tensors:
        shape = tensor.plain.shape if isinstance(tensor, Operand) else _shape_of(tensor)
        if len(shape) != g.dim():  # an empty tensor of shape (0,), which goes with any other
            continue
        size = shape[dim]
        if isinstance(tensor, Operand):
            found.append((tensor, g.narrow(dim, start, size).unsqueeze(1)))
        start += size
    return found


def _shape_of(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else value


def _of_expanded_rows(use: Use, g: Tensor, args: Any, kwargs: Any) -> Gradients | None:
    return [(args[0], g.unsqueeze(1))]


def _product(use: Use, weight: Operand, x: Tensor, g: Tensor, freed: Tensor) -> Gradients:
    """Return the gradients Σ_t g_t x_tᵀ of a weight, x: (B, *, d) and g: (B, *, p). `freed`: the output's gradient."""
    x, g = as_sequences(x), as_sequences(g)
    base = weight.plain._base
    slot, of_base = slot_of(use.tap, weight.plain), slot_of(use.tap, base)
    if slot is None and base is not None and of_base is not None and base.dim() == 2:
        if _is_view_as(weight.plain, base):
            slot = of_base
        elif _is_view_as(weight.plain.t(), base):
            slot, x, g = of_base, g, x
    if slot is None:
        return [(weight, sample_products(x, g))]
    keep_or_defer(use.tap, slot, x, g, freed.shape[-1])
    return []


def _is_view_as(plain: Tensor, base: Tensor) -> bool:
    """Return whether a view has the layout of its base: t() of t() has, and is another tensor."""
    offset, strides = plain.storage_offset(), plain.stride()
    return plain.shape == base.shape and strides == base.stride() and offset == base.storage_offset()


def _of_linear(use: Use, g: Tensor, args: Any, kwargs: Any) -> Gradients | None:
    named = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **kwargs}
    x, weight, bias = named["input"], named["weight"], named.get("bias")
    if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[0] != g.shape[0]:
        return None
    found: Gradients = []
    if isinstance(bias, Operand):
        found.append((bias, bias_sums(as_sequences(g))))
    if isinstance(weight, Operand):
        found += _product(use, weight, x.resolve_neg().to(g.dtype), g, g)
    return found


def _of_matmul(use: Use, g: Tensor, args: Any, kwargs: Any) -> Gradients | None:
    if kwargs or not isinstance(args[0], Tensor) or args[0].dim() < 2 or args[1].plain.dim() != 2:
        return None
    x, weight = args
    return _product(use, weight, g, x.resolve_neg().to(g.dtype), g)  # (d, p): x and g change places


def _of_embedding(use: Use, g: Tensor, args: Any, kwargs: Any) -> Gradients | None:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    ids, weight, padding_idx = named["input"], named["weight"], named.get("padding_idx")
    if named.get("scale_grad_by_freq"):
        return None
    if padding_idx is not None:
        padding_idx %= weight.plain.shape[0]
    return _lookup(use, weight, ids, g, padding_idx)


def _of_index(use: Use, g: Tensor, args: Any, kwargs: Any) -> Gradients | None:
    weight, ids = args
    if not isinstance(ids, Tensor) or not isinstance(weight, Operand):
        return None
    if ids.dtype == torch.bool or weight.plain.dim() != 2:
        return None
    return _lookup(use, weight, ids.remainder(weight.plain.shape[0]), g, None)


def _lookup(use: Use, weight: Operand, ids: Tensor, g: Tensor, padding_idx: int | None) -> Gradients:
    lookup = lookup_of(use.tap, weight.plain, ids, g, padding_idx)
    slot = slot_of(use.tap, weight.plain)
    if slot is None:
        return [(weight, lookup.materialise())]
    add_lookup(use.tap, slot, lookup)
    return []


def _of_layer_norm(use: Use, g: Tensor, args: Any, kwargs: Any) -> Gradients | None:
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    x, shape = named["input"], list(named["normalized_shape"])
    if not isinstance(x, Tensor):
        return None
    batch, width = g.shape[0], torch.Size(shape).numel()
    _, mean, rstd = torch.native_layer_norm(x, shape, None, None, named.get("eps", 1e-5))
    weight_sums, sums = layer_norm_sums(
        g.reshape(batch, -1, width), x.reshape(batch, -1, width), mean.reshape(batch, -1), rstd.reshape(batch, -1)
    )
    pairs = ((named.get("weight"), weight_sums), (named.get("bias"), sums))
    return [(operand, values) for operand, values in pairs if isinstance(operand, Operand)]


def _of_conv(use: Use, g: Tensor, args: Any, kwargs: Any) -> Gradients | None:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    x, weight, bias = named["input"], named["weight"], named.get("bias")
    n = g.dim() - 2
    if not isinstance(x, Tensor) or x.dim() != n + 2 or x.shape[0] != g.shape[0]:
        return None
    found: Gradients = []
    if isinstance(bias, Operand):
        found.append((bias, g.sum(tuple(range(2, g.dim())), dtype=wide(g.dtype))))
    if isinstance(weight, Operand):
        plain = weight.plain
        steps = [named.get(name, 1) for name in ("stride", "dilation")]
        stride, dilation = ((step,) * n if isinstance(step, int) else tuple(step) for step in steps)
        padding = named.get("padding", 0)
        padding = (padding,) * n if isinstance(padding, int) else padding
        setting = setting_of((tuple(plain.shape[2:]), stride, padding, dilation, named.get("groups", 1), "zeros"))
        x = (x if setting.pad is None else pad_zeros(x, setting.pad)).to(g.dtype)
        slot = slot_of(use.tap, plain)
        if slot is not None:
            add_patches(use.tap, slot, x, g, setting.geometry)
        else:
            found.append((weight, patches_of(use.tap, x, g, setting.geometry, tuple(plain.shape))))
    return found


Rule = Callable[[Use, Tensor, Any, Any], Gradients | None]
RULES: dict[str, tuple[Rule, bool]] = {
    "add": (_of_add, False),
    "sub": (_of_sub, False),
    "mul": (_of_mul, True),
    "cat": (_of_cat, False),
    "concat": (_of_cat, False),
    "expand_rows": (_of_expanded_rows, False),
    "linear": (_of_linear, True),
    "matmul": (_of_matmul, True),
    "embedding": (_of_embedding, True),
    "getitem": (_of_index, True),
    "layer_norm": (_of_layer_norm, True),
    "conv1d": (_of_conv, True),
    "conv2d": (_of_conv, True),
    "conv3d": (_of_conv, True),
}


STEPS_BACK = frozenset(("contiguous", "clone", "where"))


def step_back(name: str, operands: list[Any], result: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
    """Return the one tensor of parameters that an operator was given, and what turns gradients of its result into its.

    Every block may make the same thing of a parameter, say a mask of its position bias. Gradients that are brought back
    to what the blocks share can be added up before they are pulled back further. None if there is no rule.
    """
    given = [place for place, operand in enumerate(operands) if isinstance(operand, Operand)]
    if len(given) != 1:
        return None
    plain = operands[given[0]].plain
    if plain.shape != result.shape or plain.dtype != result.dtype:
        return None
    if name in ("contiguous", "clone"):
        return plain, lambda rows: rows
    if name == "where" and given != [0] and len(operands) == 3:
        chosen = operands[0] if given == [1] else ~operands[0]
        return plain, lambda rows: torch.where(chosen, rows, 0)
    return None


def gradients_by_row(use: Use, operands: list[Any], spec: Any, gs: tuple[Tensor, ...], autocast: Any) -> Gradients:
    """Return the gradients of any operator: it runs again for each row, and its own derivative gives them."""
    places = [place for place, operand in enumerate(operands) if isinstance(operand, Operand)]
    rows = [place for place, row in enumerate(use.rows) if row and place not in places]
    plain = tuple(operands[place].plain.detach() for place in places)
    device, dtype = autocast

    def answers(values: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        leaves = list(operands)
        for place, value in (*zip(places, values, strict=True), *zip(rows, given, strict=True)):
            leaves[place] = value
        args, kwargs = rebuild(leaves, spec)
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            found = pytree.tree_leaves(use.func(*args, **kwargs))
        return tuple(leaf for leaf in found if isinstance(leaf, Tensor) and leaf.is_floating_point())

    def one(given: tuple[Tensor, ...], g: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = tuple(each.unsqueeze(0) for each in given)
        found, pull = vjp(lambda *values: answers(values, given), *plain)[:2]
        return pull(tuple(each.unsqueeze(0).to(answer.dtype) for each, answer in zip(g, found, strict=True)))  # type: ignore[no-any-return]

    inputs = tuple(operands[place] for place in rows)
    batch = len(gs[0])
    try:
        stacked = vmap(one, randomness="error")(inputs, gs)
    except Exception:  # no batching rule: one row after the other
        each = [one(tuple(x[b] for x in inputs), tuple(g[b] for g in gs)) for b in range(batch)]
        stacked = tuple(torch.stack(values) for values in zip(*each, strict=True))
    return [(operands[place], values) for place, values in zip(places, stacked, strict=True)]
