"""Contributions: the pieces of a parameter's per-sample gradients that a backward pass leaves.

A parameter's gradient for sample b is a sum of contributions, one for each use of the parameter:

    Kept    values: (B, *shape)                  the per-sample gradient itself
    Outer   x: (B, T, d), g: (B, T, p)           Σ_t g_t x_tᵀ, shape (p, d)
    Lookup  ids: (B, T), g: (B, T, d)            row ids_t receives g_t, shape (rows, d)
    Patches x, g of a convolution                Outer over unfolded patches, made again when needed (layers/conv.py)
    Summed  g: (B, T, p)                         Σ_t g_t, shape (p,): a bias beside an Outer, which holds that g anyway;
                                                 or g is sums of stretches of positions

x and g are the very tensors of the backward pass, not copies. They are read again when the factors are known, so each
contribution remembers their version counters: a tensor changed in place meanwhile is an error, never a wrong norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from dpscope.errors import UserError
from dpscope.flash.gradients.paths import KEEP, Decision, PathRules, stored_dtype
from dpscope.flash.kernels.kept_gradients import kept_norms_squared, kept_sums
from dpscope.flash.kernels.sample_products import products_and_norms
from dpscope.flash.kernels.sample_sums import bias_sums
from dpscope.flash.kernels.scaled_sum import scaled_sums
from dpscope.flash.kernels.triton_runtime import rows_are_aligned, slices
from dpscope.vocabulary.components import GRADIENTS
from dpscope.vocabulary.phases import allocates

Outs = Sequence[Tensor | None]  # that sums are added to


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and squares: float64 for float64 tensors, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def refuse_complex(name: str, parameter: Tensor) -> None:
    if parameter.is_complex():
        raise UserError(
            f"{name} is a complex parameter, and norms and noise are real: make it a real parameter (..., 2) and call "
            "torch.view_as_complex on it in forward, or freeze it"
        )


# torch 2.8 and later write the float32 product of half-precision matrices themselves, on CUDA.
WIDE_OUTPUT: bool = "dtype" in torch.ops.aten.bmm.overloads()  # type: ignore[no-untyped-call]


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, batched, in float32 (float64 for float64)."""
    dtype = wide(left.dtype)
    if left.dtype != dtype and left.is_cuda and WIDE_OUTPUT:
        return torch.bmm(left, right, out_dtype=dtype)
    return torch.bmm(left.to(dtype), right.to(dtype))


def sample_products(x: Tensor, g: Tensor) -> Tensor:
    """Return g_bᵀ x_b as it is stored, (B, p, d). x: (B, T, d), g: (B, T, p).

    cuBLAS is fast if it may read 16-byte words along p, so the columns beyond the last whole word are computed
    separately.
    """
    left = g.transpose(1, 2)
    if stored_dtype(g.dtype) != g.dtype:
        return wide_product(left, x)
    whole = g.shape[2] - g.shape[2] % 8
    if whole in (0, g.shape[2]) or not g.is_cuda or not rows_are_aligned(g):
        return torch.bmm(left, x)
    out = g.new_empty(g.shape[0], g.shape[2], x.shape[2])
    for columns in (slice(whole), slice(whole, None)):
        torch.bmm(left[:, columns], x, out=out[:, columns])
    return out


class Contribution:
    """Contribution of one use of a parameter, for all samples. Subclasses define how it is held, normed and summed.

    A step asks hundreds of them the same: what it asks of all is an attribute, not a method.
    """

    __slots__ = ()
    kind: ClassVar[str]  # for explain()
    batch_size: int
    values: Tensor | None = None  # per-sample gradients, (B, *shape), if that is what is held
    squares: Tensor | None = None  # (B, n), whose sums over n are the squared norms, where they are known
    summed_later: Tensor | None = None  # g: (B, T, p) whose sums over T they are, if that is what is held
    decision: Decision | None = None  # the path of its norms, if it has one
    is_copy: bool = False  # of memory that a CUDA graph keeps

    @property
    def squares_wait(self) -> bool:
        """True if a launch may make the squares of several: see `squares_of`."""
        return False

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """Return the tensors of the backward pass that are held: x and g."""
        return ()

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {}

    @property
    def is_borrowed(self) -> bool:
        """True if what is held has another owner, too."""
        return False

    def launch_key(self) -> tuple[object, ...]:
        """Return what is equal for contributions that share a launch. Those of one first item are summed together."""
        return ()

    def check_unchanged(self, name: str) -> None:
        """Raise UserError if what is held was changed in place."""

    def absorb(self, other: Contribution, dtype: torch.dtype) -> bool:
        """Add `other`, of the same parameter, into this one if possible. Return True if only one is still needed."""
        return False

    def grouped(self, group: Callable[[Tensor], Tensor], rules: PathRules) -> Contribution:
        """Return the contribution with several rows as one sample. group: rows (B·k, ...) -> (B, k, ...)."""
        return Kept(group(self.materialise()).sum(1))

    def materialise(self) -> Tensor:
        """Return the per-sample gradients, (B, *shape)."""
        raise NotImplementedError

    def kept_product(self) -> Tensor | None:
        """Return the per-sample gradients of a product whose path is to keep them; None for anything else."""

    def square_parts(self) -> Tensor | None:
        """Return (B, n) whose sums over n are the squared norms, where a kernel makes or has made them."""

    def squares_of(self, members: Sequence[Any]) -> list[Tensor]:
        """Return `square_parts` of contributions of this one's class, which wait for it."""
        raise NotImplementedError

    def norms_squared(self) -> Tensor:
        """Return squared norms, (B,), without keeping per-sample gradients."""
        parts = self.square_parts()
        return kept_norms_squared([self.materialise()]) if parts is None else parts.sum(1)

    def clipped_sum(self, scale: Tensor, out: Tensor | None) -> Tensor:
        """Return Σ_b scale_b v_b, added into `out` if given. A sample with scale 0 is left out, even if it has NaN."""
        return kept_sums([self.materialise()], scale, outs=[out])[0]

    def clipped_sums(
        self, members: list[Any], scale: Tensor, rows: Sequence[int], outs: Outs, *, let_go_together: bool = False
    ) -> list[Tensor]:
        """Return the clipped sums of contributions that share this one's `launch_key`: see `scaled_sums`."""
        # Each is freed before the next is summed.
        return [members.pop(0).clipped_sum(scale[row], out) for row, out in zip(rows, outs, strict=True)]


class Kept(Contribution):
    """Per-sample gradients themselves. `owned`: the storage has no other owner and may be overwritten.

    squares: (B, n), whose sums over n are the squared norms of these values, if they are known
    """

    __slots__ = ("batch_size", "owned", "squares", "values", "version")
    kind = "kept"
    values: Tensor

    def __init__(self, values: Tensor, *, squares: Tensor | None = None, owned: bool = True) -> None:
        self.values = values
        self.batch_size = values.shape[0]
        self.squares = squares
        self.owned = owned
        self.version = values._version

    def square_parts(self) -> Tensor | None:
        return self.squares if self.values._version == self.version else None

    @property
    def is_borrowed(self) -> bool:
        return not self.owned

    def check_unchanged(self, name: str) -> None:
        if not self.owned and self.values._version != self.version:
            refuse_changed(name)

    def absorb(self, other: Contribution, dtype: torch.dtype) -> bool:
        values = other.values
        if values is None or not self.owned or self.values.dtype != dtype or self.values.shape != values.shape:
            return False
        self.values.add_(values)
        return True

    def materialise(self) -> Tensor:
        return self.values


def kept_products(x: Tensor, g: Tensor) -> Kept:
    """Return g_bᵀ x_b of all samples, with their norms if one kernel makes both. x: (B, T, d), g: (B, T, p)."""
    made = products_and_norms(x, g)
    return Kept(sample_products(x, g)) if made is None else Kept(made[0], squares=made[1])


class Summed(Contribution):
    """Σ_t g_t for each sample, g: (B, T, p): taken with those of other layers when the micro-batch is closed.

    owned: g holds sums over stretches of positions and has no other owner; otherwise an Outer holds it, too
    """

    __slots__ = ("batch_size", "owned", "summed_later", "version")
    kind = "kept"
    summed_later: Tensor

    def __init__(self, g: Tensor, *, owned: bool = False) -> None:
        self.summed_later = g
        self.batch_size = g.shape[0]
        self.owned = owned
        self.version = g._version

    @property
    def is_borrowed(self) -> bool:
        return not self.owned

    def check_unchanged(self, name: str) -> None:
        if self.summed_later._version != self.version:
            refuse_changed(name)

    def grouped(self, group: Callable[[Tensor], Tensor], rules: PathRules) -> Summed:
        return Summed(group(self.summed_later).flatten(1, 2), owned=self.owned)

    def materialise(self) -> Tensor:
        return bias_sums(self.summed_later)


def refuse_changed(name: str) -> NoReturn:
    raise UserError(
        f"the input or output gradient of the layer that owns {name} was changed in place between backward and the "
        "optimizer step, which needs it; copy the batch into fresh tensors "
        "(docs/sharp-edges.md#changes-between-backward-and-step)"
    )


def held(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if torch does not own its memory.

    Writes to numpy's memory would go unnoticed, and a CUDA graph writes to its own again.
    """
    return tensor if tensor.untyped_storage().resizable() else tensor.clone()


class Saved(Contribution):
    """Tensors of the backward pass, watched for in-place changes until they are summed.

    `decision`: the path their norms take; `kind` and `names` of the two tensors are for explain().
    """

    __slots__ = ("batch_size", "decision", "first", "g", "is_copy", "versions")
    names: ClassVar[tuple[str, str]] = ("x", "g")

    def __init__(self, first: Tensor, g: Tensor, decision: Decision) -> None:
        # The tensor without its history: holding it must not hold the graph of the forward pass.
        self.first = first.detach() if first.requires_grad else held(first)
        self.g = held(g)
        self.is_copy = self.g is not g
        self.batch_size = g.shape[0]
        self.versions = (self.first._version, self.g._version)
        self.decision: Decision = decision

    @property
    def saved(self) -> tuple[Tensor, Tensor]:
        return self.first, self.g

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return dict(zip(self.names, (self.first.shape, self.g.shape), strict=True))

    def check_unchanged(self, name: str) -> None:
        if self.versions != (self.first._version, self.g._version):
            refuse_changed(name)


class Outer(Saved):
    """Σ_t g_t x_tᵀ for each sample. `x`: (B, T, d), `g`: (B, T, p)."""

    __slots__ = ()
    kind = "outer"

    @property
    def x(self) -> Tensor:
        return self.first

    def launch_key(self) -> tuple[object, ...]:
        x, g = self.first, self.g
        return Outer, x.shape, x.dtype, g.shape, g.dtype

    def grouped(self, group: Callable[[Tensor], Tensor], rules: PathRules) -> Outer | Kept:
        """Turn the rows of a sample into more positions of it."""
        x, g = (group(each).flatten(1, 2) for each in self.saved)
        product = Outer(x, g, rules.of_product(x.shape, g))
        return Kept(product.materialise()) if product.decision.path == KEEP else product

    def materialise(self) -> Tensor:
        return sample_products(self.x, self.g)

    def norms_squared(self) -> Tensor:
        """Compute the norms by the direct path: per-sample gradients in slices of the batch, squared and dropped.

        They are never rounded to half precision, because the sum is not, and a norm of rounded values may be 2⁻⁹ too
        small.
        """
        each = self.x.shape[-1] * self.g.shape[-1] * wide(self.g.dtype).itemsize
        norms = [
            kept_norms_squared([wide_product(self.g[part].transpose(1, 2), self.x[part])])
            for part in slices(self.batch_size, each, scratch=True)
        ]
        return torch.cat(norms)

    def kept_product(self) -> Tensor | None:
        return self.materialise() if self.decision.path == KEEP else None

    def rank1_norms_squared(self) -> Tensor:
        """Return squared norms for T = 1: ||g xᵀ||² = ||x||²||g||²."""
        return kept_norms_squared([self.x]) * kept_norms_squared([self.g])

    def clipped_sum(self, scale: Tensor, out: Tensor | None) -> Tensor:
        return self.clipped_sums([self], scale, [0], [out])[0]

    def clipped_sums(
        self, members: list[Any], scale: Tensor, rows: Sequence[int], outs: Outs, *, let_go_together: bool = False
    ) -> list[Tensor]:
        dtype = wide(torch.promote_types(self.g.dtype, self.x.dtype))
        # A half-precision parameter's gradient cannot be added into by the product itself.
        direct = [out if out is not None and out.dtype == dtype else None for out in outs]
        gs, xs = [each.g for each in members], [each.first for each in members]
        totals = scaled_sums(gs, xs, scale.to(dtype), rows=rows, outs=direct, let_go_together=let_go_together)
        return [
            out.add_(total) if out is not None and out is not total else total
            for out, total in zip(outs, totals, strict=True)
        ]


# (g, ids, rows, no padding, not divided by counts): row ids_t of a table of zeros receives g_t.
_add_rows = torch.ops.aten.embedding_dense_backward


class Lookup(Saved):
    """Row `ids[b, t]` of the table receives `g[b, t]`; `padding_idx` receives nothing."""

    __slots__ = ("padding_idx", "rows")
    kind = "lookup"
    names = ("ids", "g")

    def __init__(self, ids: Tensor, g: Tensor, rows: int, padding_idx: int | None, decision: Decision) -> None:
        super().__init__(ids, g, decision)
        self.rows = rows
        self.padding_idx = padding_idx

    @property
    def ids(self) -> Tensor:
        return self.first

    def grouped(self, group: Callable[[Tensor], Tensor], rules: PathRules) -> Lookup | Kept:
        ids, g = group(self.first).flatten(1), group(self.g).flatten(1, 2)
        lookup = Lookup(ids, g, self.rows, self.padding_idx, rules.of_lookup(*ids.shape))
        return Kept(lookup.materialise()) if lookup.decision.path == KEEP else lookup

    def without_padding(self, g: Tensor) -> Tensor:
        return g if self.padding_idx is None else g.masked_fill((self.ids == self.padding_idx).unsqueeze(-1), 0)

    def materialise(self) -> Tensor:
        batch = self.batch_size
        first_row = torch.arange(batch, device=self.ids.device).unsqueeze(1) * self.rows
        g = self.without_padding(self.g).to(stored_dtype(self.g.dtype))
        table: Tensor = _add_rows(g, self.ids + first_row, batch * self.rows, -1, False)
        return table.view(batch, self.rows, -1)

    def added_up(self) -> tuple[Tensor, Tensor]:
        """Return ids (B, T) and rows (B, T, d), float32: rows of one id are added up at its first place, others are 0.

        This takes T·d operations; comparing all pairs of ids takes T²·d. Repeats are found by sorting, so the table of
        sums has T rows a sample, not as many as the embedding.
        """
        batch, length = self.ids.shape
        ordered, order = self.ids.sort(dim=1)
        positions = torch.arange(length, device=ordered.device).expand(batch, length)
        repeats = torch.zeros_like(ordered, dtype=torch.bool)
        repeats[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
        first = positions.masked_fill(repeats, 0).cummax(1).values
        labels = torch.empty_like(order).scatter_(1, order, first)
        labels += torch.arange(batch, device=labels.device).unsqueeze(1) * length
        g = self.without_padding(self.g)
        rows = _add_rows(g.to(wide(g.dtype)), labels, batch * length, -1, False)
        return ordered, rows.view(batch, length, -1)

    def norms_squared(self) -> Tensor:
        return kept_norms_squared([self.added_up()[1]])

    def add_into(self, table: Tensor) -> None:
        """Add the samples' gradients to `table`: (B, rows, d), whose dtype they are rounded to."""
        ids, rows = self.added_up()
        ids = ids + torch.arange(len(ids), device=ids.device).unsqueeze(1) * self.rows
        table.view(-1, table.shape[-1]).index_add_(0, ids.flatten(), rows.flatten(0, 1).to(table.dtype))

    @allocates(GRADIENTS, "aten::embedding_dense_backward")
    def clipped_sum(self, scale: Tensor, out: Tensor | None) -> Tensor:
        factors = scale.to(wide(self.g.dtype)).view(-1, 1, 1)
        scaled = torch.where(factors != 0, self.without_padding(self.g) * factors, 0)
        table: Tensor = _add_rows(scaled, self.ids, self.rows, -1, False)
        return table if out is None else out.add_(table)


class Tied(Contribution):
    """The rows of an embedding beside the product of a head that is tied to it: two uses of one weight."""

    __slots__ = ("batch_size", "decision", "lookup", "outer")
    kind = f"{Lookup.kind} + {Outer.kind}"

    def __init__(self, lookup: Lookup, outer: Outer) -> None:
        self.lookup, self.outer = lookup, outer
        self.batch_size, self.decision = outer.batch_size, outer.decision

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return self.lookup.shapes | self.outer.shapes

    def kept_product(self) -> Tensor | None:
        values = self.outer.kept_product()
        return None if values is None else values + self.lookup.materialise().to(values.dtype)

    def clipped_sum(self, scale: Tensor, out: Tensor | None) -> Tensor:
        return self.outer.clipped_sum(scale, self.lookup.clipped_sum(scale, out))
