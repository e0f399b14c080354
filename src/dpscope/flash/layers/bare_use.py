"""An operator that uses a bare parameter: which of its operands have a row for each sample, and per-sample gradients.

y = f(q, x), q a function of parameters, with y[b] = f(q, x[b:b+1])[0]. This is tested: f runs on random numbers of the
operands' shapes, on whole batches and row by row, with each operand of B rows split or shared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpscope.errors import UserError
from dpscope.flash.gradients.contributions import Kept
from dpscope.flash.gradients.slots import Slot
from dpscope.flash.layers.bare_gradients import RULES, Gradients, Operand, Rule, gradients_by_row, rebuild, slot_of
from dpscope.flash.layers.conv import Patches
from dpscope.flash.layers.row_derivatives import PulledBack, WeightDerivative, slots_behind
from dpscope.flash.sample_rows.proxy import Proxy
from dpscope.flash.taps.recorder import is_recording, note_call, record
from dpscope.flash.taps.taps import TapOfSamples
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.arguments import NEEDS_DENSE
from dpscope.flash.torch_side.autocast import autocast_dtype, no_autocast

_IN_BLOCKS = frozenset(("add", "sub", "mul", "linear"))  # operators whose rules take rows as (B, k, ...) as well
_MOST_OPEN = 5  # operands of which it is open whether they have a row for each sample
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_TOLERANCE = 2e-2
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def name_of(func: Any) -> str:
    return str(getattr(func, "__name__", func)).strip("_")


class _Seen:
    """An operator as verification sees it (`Sampled`)."""

    def __init__(self, tap: TapOfSamples, called: str) -> None:
        self.tap, self.called = tap, called
        self.name = f"{tap.name}'s {called}" if called else tap.name
        self.module = tap.module
        self.known: set[int] = set()
        self.shared: set[int] = set()


class Constant(_Seen):
    """An operator none of whose operands depends on the samples."""


class Expanded:
    """An operator that is given a row of the parameter for each sample: one that draws random numbers, or attention.

    Its own derivative then gives each row its gradient, with the random numbers that it drew. If a sample has several
    rows, such as windows of an image, all of them are given its row. A parameter with fewer than `dim` dimensions, as a
    bias of attention may have, gets leading ones.
    """

    def __init__(self, dim: int) -> None:
        self.dim = dim


class Unrelated:
    """An operator through which no gradient reaches the parameter: a comparison, `x.type_as(p)`."""


class BareUse(_Seen):
    """Use of a parameter. `rows`: if row b of each operand goes with row b of the result; `each`: rows a sample."""

    def __init__(self, tap: TapOfSamples, func: Any, rows: list[bool], each: int = 1) -> None:
        called = name_of(func)
        super().__init__(tap, called)
        self.func, self.rows, self.each = func, rows, each
        self.known_for = {each: self.known}  # by rows a sample: a sample may have another number of them by chance
        self.rule: Rule | None
        self.rule, self.saves = RULES.get(called, (None, True))
        if (called in ("add", "sub") and len(rows) != 2) or (each > 1 and called not in _IN_BLOCKS):  # alpha=...
            self.rule, self.saves = None, True
        # Autograd's node of an operator without a rule may read its answer: nobody else may write into it then.
        self.copies = self.rule is None or called == "expand_rows"
        self._derivative = WeightDerivative()
        self._moves = False  # whether other operands change with the samples
        self._prints: list[Tensor] | None = None  # of the other operands
        self._looks: set[int] = set()  # numbers of the samples that it ran on
        self.why = f"used by {called}: per-sample gradients are taken in backward"

    def look(self, samples: int, operands: list[Any]) -> None:
        """Note whether the other operands change with the samples. `samples`: a number for those of this run."""
        if samples in self._looks:
            return
        self._looks.add(samples)
        prints = [_fingerprint(x) for x in operands if isinstance(x, Tensor)]
        if self._prints is None:
            self._prints = prints
        elif len(prints) != len(self._prints) or not all(map(torch.equal, prints, self._prints)):
            self._moves = True

    def by_chance(self) -> bool:
        """Return whether the operator ran on other samples too, and its operands were the same."""
        return bool(self._prints) and len(self._looks) > 1 and not self._moves

    def fits(self, leaves: list[Any], batch: int) -> bool:
        """Return whether the sizes prove that rows are laid out as before."""
        return batch > 1 and all(
            row == (batch * self.each == _row_count(leaf)) for leaf, row in zip(leaves, self.rows, strict=True)
        )

    def record(self, operands: list[Any], spec: Any, gs: tuple[Tensor, ...], autocast: Any) -> None:
        """Give the engine the per-sample gradients of the parameters, g: (B, ...) the gradients of the answers."""
        with torch.enable_grad():  # a row of parameters that were expanded
            operands = [
                Operand(operand.plain[:1]) if row and isinstance(operand, Operand) else operand
                for operand, row in zip(operands, self.rows, strict=True)
            ]
        found: Gradients | None = None
        if self.rule is not None and len(gs) == 1:
            given = self._in_blocks(operands) if self.each > 1 else operands
            args, kwargs = rebuild(given, spec)
            found = self.rule(self, self.block(gs[0]), args, kwargs)
        if found is None:
            found = gradients_by_row(self, operands, spec, gs, autocast)
            if self.each > 1:
                found = [(operand, self.block(_whole(values)).sum(1)) for operand, values in found]
        there = ((operand.plain, g) for operand, g in found if operand.plain.numel())  # an empty one has no gradient
        parts = [part for plain, g in there for part in self._of_parameters(plain, g)]
        # What is added to later has to have a place for each element, and not to be autograd's or another parameter's:
        # a sum's terms have one gradient, the same tensor.
        shared = Counter(tensor.untyped_storage().data_ptr() for tensor in (*gs, *(values for _, values in parts)))
        for slot, values in parts:
            self._describe(slot, len(values))
            ours = shared[values.untyped_storage().data_ptr()] == 1 and 0 not in values.stride()
            self.tap.engine.add(slot, Kept(values, owned=ours))

    def _describe(self, slot: Slot, batch: int) -> None:
        if slot.why != self.why:
            slot.describe("kept", self.why, {"": torch.Size((batch, *slot.parameter.shape))})

    def block(self, tensor: Tensor) -> Tensor:
        """Return rows (B·k, ...) as (B, k, ...), if a sample has k rows."""
        return tensor if self.each == 1 else tensor.reshape(-1, self.each, *tensor.shape[1:])

    def _in_blocks(self, operands: list[Any]) -> list[Any]:
        return [
            self.block(operand) if row and isinstance(operand, Tensor) else operand
            for operand, row in zip(operands, self.rows, strict=True)
        ]

    def _of_parameters(self, q: Tensor, found: Tensor | Patches) -> Iterator[tuple[Slot, Tensor]]:
        """Yield the gradients of the parameters that q is made of, given q's; add those in closed form here."""
        engine = self.tap.engine
        if isinstance(found, Patches) and slot_of(self.tap, q._base) is None:
            derived = self._derivative.contributions(engine, q, found)
            for trained, contribution in derived:
                if trained.why != self.why:
                    trained.describe("derived", self.why, found.shapes)
                engine.add(trained, contribution)
            if derived:
                return
        rows = _whole(found)
        rows = rows.reshape(len(rows), *q.shape)
        while (made_of := getattr(q, "made_of", None)) is not None:
            q, pull = made_of
            rows = pull(rows)
        slot = slot_of(self.tap, q)
        if slot is not None:
            yield slot, rows
            return
        base = q._base
        slot = slot_of(self.tap, base)
        plain = base is not None and q.dtype == base.dtype and base.is_contiguous() and not q.is_neg()
        if slot is not None and base is not None and plain and not _overlaps(q):
            yield slot, _scattered(q, base, rows)
            return
        slots, rows = slots_behind(engine, q), rows.to(q.dtype)
        if len(slots) == 1:
            self._describe(slots[0], len(rows))
            engine.add(slots[0], PulledBack(q, slots[0].parameter, rows, self._derivative.pulled_back))
            return
        each = self._derivative.pulled_back(q, [slot.parameter for slot in slots], rows)
        yield from ((slot, values) for slot, values in zip(slots, each, strict=True) if values is not None)


def _fingerprint(x: Tensor) -> Tensor:
    """Return the sums of the bits of all elements, and of every other one."""
    x = x.detach().resolve_conj().resolve_neg()
    x = (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)
    bits = x if x.dtype == torch.bool else x.view(_BITS[x.element_size()])
    return torch.stack([bits.sum(dtype=torch.int64), bits[::2].sum(dtype=torch.int64)])


def _whole(values: Tensor | Patches) -> Tensor:
    return values.materialise() if isinstance(values, Patches) else values


def _overlaps(q: Tensor) -> bool:
    """Return whether a view may hold an element of its base twice (`unfold`), other than by plain repetition."""
    reach = 0
    for stride, size in sorted(zip(q.stride(), q.shape, strict=True)):
        if size > 1 and stride:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _scattered(q: Tensor, base: Tensor, gradients: Tensor) -> Tensor:
    """Scatter gradients (B, *q.shape) of a view q to its base: (B, *base.shape)."""
    repeated = [dim for dim, stride in enumerate(q.stride()) if stride == 0 and q.shape[dim] > 1]
    if repeated:
        gradients = gradients.sum([dim + 1 for dim in repeated], keepdim=True)
    batch, numel = len(gradients), base.numel()
    if q.numel() == numel and q.is_contiguous() and q.storage_offset() == base.storage_offset():
        return gradients.reshape(batch, *base.shape)
    values = gradients.new_zeros(batch, numel)
    shape, strides = gradients.shape[1:], q.stride()
    offset = q.storage_offset() - base.storage_offset()
    values.as_strided((batch, *shape), (numel, *strides), offset).copy_(gradients)
    return values.view(batch, *base.shape)


# -- the node behind a use ---------------------------------------------------------------------------------------------


class Used(torch.autograd.Function):
    """Autograd node that returns y unchanged; backward gives the use its gradient."""

    @staticmethod
    def forward(ctx: Any, call: Any, anchor: Tensor, *ys: Tensor) -> Any:
        use, leaves, spec = call
        note_call(ctx, use.tap)
        ctx.use, ctx.spec = use, spec
        ctx.autocast = ys[0].device.type, autocast_dtype(ys[0])
        ctx.leaves, ctx.places = list(leaves), []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and not isinstance(leaf, Proxy):
                ctx.leaves[place] = leaf.shape
                ctx.places.append(place)
        if use.saves:
            ctx.save_for_backward(*(leaves[place] for place in ctx.places))
        results = tuple(y.clone() if use.copies else _unsafe_view(y, y.shape) for y in ys)
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> tuple[Tensor | None, ...]:
        if is_recording(ctx):
            record(ctx, len(gs[0]), lambda: _record(ctx, gs))
        return (None, None, *gs)


_unsafe_view = torch.ops.aten._unsafe_view.default
# What Function.apply calls after it has looked for torch.func's transforms, in which nothing is followed.
apply_used: Any = super(torch.autograd.Function, Used).apply


def _record(ctx: Any, gs: tuple[Tensor, ...]) -> None:
    use = ctx.use
    leaves = list(ctx.leaves)
    if use.saves:
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            leaves[place] = tensor
    gs = tuple(g.resolve_neg() for g in gs)
    with no_autocast(ctx.autocast[0]):
        use.record(operands_of(leaves), ctx.spec, gs, ctx.autocast)


def operands_of(leaves: list[Any]) -> list[Any]:
    """Return the operands of a use, with proxies replaced by their tensors."""
    return [Operand(leaf.plain) if isinstance(leaf, Proxy) else leaf for leaf in leaves]


# -- learning ----------------------------------------------------------------------------------------------------------


def _row_count(leaf: Any) -> int:
    """Return the number of rows that may be samples, 0 if none may. Rows of parameters count only if they are equal."""
    if isinstance(leaf, Operand | Proxy):
        plain = leaf.plain
        return plain.shape[0] if plain.dim() and plain.shape[0] > 1 and plain.stride(0) == 0 else 0
    return leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else 0


def learn(
    tap: TapOfSamples, func: Any, operands: list[Any], spec: Any, batch: int
) -> BareUse | Constant | Expanded | Unrelated | str:
    """Return the role of the operator for the parameter; a reason, if it cannot be followed."""
    if any(isinstance(leaf, Tensor) and leaf.layout != torch.strided for leaf in operands):
        raise UserError(f"{tap.name} uses a parameter of its own with a sparse tensor, {NEEDS_DENSE}")
    planned = dry_run.current() is not None
    devices = [leaf.device for leaf in operands if isinstance(leaf, Tensor) and leaf.is_cuda and not planned]
    with torch.random.fork_rng(list(set(devices))):
        with torch.enable_grad():
            values = [operand.plain if isinstance(operand, Operand) else _detached(operand) for operand in operands]
            answers = _answers(func, values, spec)
        if not any(answer.requires_grad for answer in answers):
            return Unrelated()
        called = name_of(func)
        if any(answer.is_complex() for answer in answers):
            return f"{called} gives complex numbers"
        bares = [operand.plain for operand in operands if isinstance(operand, Operand)]
        attends = called in _ATTENTION
        dim = max((x.dim() for x in operands if isinstance(x, Tensor)), default=1) if attends else 1
        one_row = all(0 < plain.dim() < dim or (plain.dim() and len(plain) == 1) for plain in bares)
        meets_rows = one_row and rows_of_a_sample(operands, batch) > 0
        if meets_rows and (attends or (not planned and _is_random(func, values, spec, answers))):
            return Expanded(dim)
        counts = {answer.shape[0] if answer.dim() else 0 for answer in answers}
        count = counts.pop()
        if counts or (count % batch if batch else count) or (batch and not count):
            return Constant(tap, called)
        rows = [False] * len(operands) if count < 2 else _find_rows(func, operands, spec, count)
        if rows is None:  # as many rows by chance, perhaps: verification finds out whether samples have a part in it
            return Constant(tap, called)
        return rows if isinstance(rows, str) else BareUse(tap, func, rows, count // batch if batch else 1)


_ROUTES = frozenset(("_grouped_mm", "grouped_mm"))  # rows to experts
_ATTENTION = frozenset(("scaled_dot_product_attention",))


def rows_of_a_sample(operands: list[Any], batch: int) -> int:
    """Return how many rows of an operator's operands belong to a sample; 0 if none do."""
    lengths = [len(x) for x in operands if isinstance(x, Tensor) and not isinstance(x, Proxy) and x.dim()]
    return max([length // batch for length in lengths if length % batch == 0], default=0) if batch > 1 else 0


def _is_random(func: Any, values: list[Any], spec: Any, answers: list[Tensor]) -> bool:
    with torch.no_grad():
        again = _answers(func, values, spec)
    return any(not torch.equal(a.detach().nan_to_num(), b.nan_to_num()) for a, b in zip(answers, again, strict=True))


def _detached(operand: Any) -> Any:
    return operand.detach() if isinstance(operand, Tensor) else operand


def _answers(func: Any, values: list[Any], spec: Any) -> list[Tensor]:
    args, kwargs = rebuild(values, spec)
    return [leaf for leaf in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]


def _find_rows(func: Any, operands: list[Any], spec: Any, batch: int) -> list[bool] | str | None:
    """Return which operands have a row for each sample: None if none has, a reason if that cannot be decided."""
    called = name_of(func)
    choices = [(True, False) if batch == _row_count(operand) else (False,) for operand in operands]
    if dry_run.current() is not None:  # there are no values, and shapes alone have to fit
        if called in _ROUTES:
            return f"{called} has the rows of a sample where values say"
        by_shape = (rows for rows in product(*choices) if any(rows) and _fits_shapes(func, operands, spec, rows))
        return next(map(list, by_shape), None)
    if sum(len(choice) > 1 for choice in choices) > _MOST_OPEN:
        return f"{called} is given too many tensors"
    fitting: list[tuple[bool, ...]] = []
    device = next((x.device.type for x in operands if isinstance(x, Tensor)), "cpu")
    for wide in (True, False):
        try:
            with no_autocast(device) if wide else nullcontext():  # rounded answers hide whose row it is
                fitting = list(_fitting(func, operands, spec, batch, choices, wide))
        except Exception:  # the operator has no float64, or not for these operands
            continue
        if fitting:
            break
    if not fitting:
        return None
    if len(fitting) > 1:
        return f"it cannot be told which operands of {called} have a row for each sample"
    return list(fitting[0])


def _fitting(
    func: Any, operands: list[Any], spec: Any, batch: int, choices: Sequence[tuple[bool, ...]], wide: bool
) -> Iterator[tuple[bool, ...]]:
    with torch.no_grad():
        values = [_random_like(operand, wide) for operand in operands]
        whole = _answers(func, values, spec)
        again = _answers(func, values, spec)
        if not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(whole, again, strict=True)):
            return  # it draws random numbers
        if not any(bool(answer.isfinite().any()) for answer in whole):
            return
        for rows in product(*choices):
            try:
                if all(_agrees(func, values, spec, whole, rows, b) for b in (0, batch - 1)):
                    yield rows
            except Exception:  # operands do not fit together so
                continue


def _fits_shapes(func: Any, operands: list[Any], spec: Any, rows: tuple[bool, ...]) -> bool:
    """Return whether one row of these operands gives one row of each answer."""
    values = [operand.plain if isinstance(operand, Operand) else operand for operand in operands]
    chosen = [value[:1] if row else value for value, row in zip(values, rows, strict=True)]
    with torch.no_grad():
        try:
            pairs = zip(_answers(func, chosen, spec), _answers(func, values, spec), strict=True)
            return all(answer.shape == (1, *whole.shape[1:]) for answer, whole in pairs)
        except Exception:  # operands do not fit together so
            return False


def _agrees(func: Any, values: list[Any], spec: Any, whole: list[Tensor], rows: tuple[bool, ...], b: int) -> bool:
    chosen = [value[b : b + 1] if row else value for value, row in zip(values, rows, strict=True)]
    for answer, expected in zip(_answers(func, chosen, spec), whole, strict=True):
        if answer.shape != (1, *expected.shape[1:]):
            return False
        tolerance = _TOLERANCES.get(expected.dtype, _HALF_TOLERANCE)
        scale = float(expected.double().nan_to_num(0, 0, 0).abs().amax()) if expected.numel() else 0.0
        close = torch.allclose(
            answer.double(), expected[b : b + 1].double(), rtol=tolerance, atol=tolerance * scale, equal_nan=True
        )
        if not close:
            return False
    return True


def _random_like(operand: Any, wide: bool) -> Any:
    """Draw numbers inside the domain of most operators. Integers are permuted."""
    tensor = operand.plain if isinstance(operand, Operand) else operand
    if not isinstance(tensor, Tensor):
        return tensor
    tensor = tensor.detach()
    shape = tensor.shape
    if batch_rows := (isinstance(operand, Operand) and _row_count(operand) > 0):
        shape = torch.Size((1, *shape[1:]))
    if tensor.dtype == torch.bool:
        value = torch.rand(shape, device=tensor.device) < 0.5
    elif tensor.is_floating_point():
        dtype = torch.float64 if wide and tensor.device.type != "mps" else tensor.dtype
        value = (0.1 + 0.8 * torch.rand(shape, device=tensor.device)).to(dtype)
    else:
        flat = tensor.reshape(-1)
        value = flat[torch.randperm(math.prod(shape), device=flat.device)].view(shape)
    return value.expand(tensor.shape) if batch_rows else value
