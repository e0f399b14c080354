"""The derivative of weights whose rows are standardised, normalised or scaled, applied to many gradients at once.

For q made of a weight w, both (O, n), and E_o an orthonormal basis of span(1, w_o), suppose that for every row o

    Jᵀv = a_o v_o + E_o N_o E_oᵀ v_o

as it is for (w - mean)/std, w/‖w‖ and γ_o·w, with any constants in them and by whatever operators. A gain γ with one
element a row receives ζ_oᵀE_oᵀv_o, because ∂q_o/∂γ_o is in the span as well. Three probes through autograd then give a,
N, ζ and whether it is so, however many samples there are: all three have parts in E and outside. A
linear map that has this form for a random vector has it for all. Where a row has not, its gradients are NaN, so that no
sample has a share in a step whose derivative was not this one. A weight that is clamped, say, may reach its bounds at
any time; on a GPU, which nobody waits for, that is known a step or two later (`Verdict`).

Jᵀ is the same for all samples, so Σ_b c_b Jᵀv_b = Jᵀ Σ_b c_b v_b, and ‖Jᵀv_b‖² follows from ‖v_bo‖² and Eᵀv_bo: the
samples' gradients of w need not be made at all (`Derived`). All derivatives are found when the first norm is asked for.
the probes of many layers are pulled back together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm  # torch's own, whatever F.layer_norm becomes

from dpscope.flash.gradients.contributions import Contribution, Kept, Outs, refuse_changed
from dpscope.flash.gradients.paths import KEEP, Decision
from dpscope.flash.gradients.slots import OWN_GRADIENTS, Slot
from dpscope.flash.kernels.kept_gradients import kept_sums
from dpscope.flash.layers.conv import Patches
from dpscope.flash.taps.recorder import Engine
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.autocast import no_autocast
from dpscope.flash.torch_side.autograd_graph import leaves_behind
from dpscope.flash.torch_side.captures import device_cache, own_capture

PROBES = 3
_ALL = slice(None)
LEAST_OUTSIDE = 2.0**-12
_WEIGHT_OF_BASIS = 16.0  # in two of the probes, beside random numbers of size one
_AT_ONCE = 2**21  # elements of weights whose probes are pulled back together
_Event: Any = torch.cuda.Event
Pull = Callable[[Tensor, list[Any], Tensor], Sequence[Tensor | None]]  # q, parameters, gradients of q -> theirs
_TOLERANCE = 2e-5  # of a row's length: sums of thousands of float32 are known to 1e-6


class Verdict:
    """Yes or no for each of many rows, made on a device and read when it has come."""

    def __init__(self, flags: Tensor) -> None:
        self._flags = torch.empty(flags.shape, dtype=torch.bool, device="cpu", pin_memory=flags.is_cuda)
        self._flags.copy_(flags, non_blocking=True)
        self._seen = self._flags.numpy()
        self._event: Any = _Event() if flags.is_cuda else None
        if self._event is not None:
            self._event.record()

    def has_come(self) -> bool:
        return self._event is None or bool(self._event.query())

    def is_no(self, rows: slice = _ALL) -> bool:
        """Return whether it has come, and is no for one of these rows."""
        return self.has_come() and not self._seen[rows].all()


class RowForm(NamedTuple):
    """Jᵀ of weights with O rows, and of their gains.

    scale: a, (O,), NaN where a row has another form; inner: N, (O, 2, 2); gain: ζ, (O, 2), zero without a gain;
    basis: E, (O, 2, n)
    """

    scale: Tensor
    inner: Tensor
    gain: Tensor
    basis: Tensor

    def applied(self, v: Tensor) -> Tensor:
        """Return a v + E N Eᵀ v, for v: (B, *shape) with O rows."""
        rows = v.flatten(2)
        along = torch.bmm(rows.transpose(0, 1), self.basis.mT)  # (O, B, 2)
        values = rows * self.scale.unsqueeze(1)
        values.transpose(0, 1).baddbmm_(torch.bmm(along, self.inner.mT), self.basis)
        return values.view(v.shape)


def squares_of(scale: Tensor, inner: Tensor, products: Tensor) -> Tensor:
    """Return ‖Jᵀv_bo‖², (B, O), from ‖v_bo‖² and Eᵀv_bo: (B, 3, O) float64.

    Jᵀv has two orthogonal parts, a (v - EEᵀv) and E (a + N) Eᵀv. Where little of v is outside of E, rounding is all
    that is known of the first: it is taken to be at least `LEAST_OUTSIDE` of v, which only clips more.
    """
    squares, along = products[:, 0], products[:, 1:].transpose(1, 2)  # (B, O), (B, O, 2)
    outside = torch.maximum(squares - along.square().sum(2), LEAST_OUTSIDE * squares)
    scale = scale.double()
    inner = inner.double() + scale.view(-1, 1, 1) * _identity(scale)
    inside = torch.einsum("oij,boj->boi", inner, along).square().sum(2)
    return scale.square() * outside + inside


def _identity(like: Tensor) -> Tensor:
    return torch.eye(2, dtype=like.dtype, device=like.device)


def directions_of(w: Tensor) -> Tensor:
    """Return (O, n): w_o less its mean, of length √n; zeros where nothing is left. The vector of ones is beside it.

    One operator makes them, because there is one call for each layer.
    """
    flat = w.detach().flatten(1)
    return layer_norm(flat, flat.shape[1:], eps=torch.finfo(flat.dtype).tiny)


class Weight(NamedTuple):
    """A weight w, and q that is made of it and perhaps of a gain. A `Derived` is one, too, until its form is known."""

    q: Tensor
    w: Tensor
    gain: Tensor | None
    directions: Tensor


class EqualRows:
    """Weights whose rows are equally long, one after the other: R rows of n elements.

    form: of all these rows, and `fits`, (R,): which have it. `find_forms` sets both.
    """

    form: RowForm
    fits: Tensor

    def __init__(self, weights: Sequence[Any]) -> None:
        self.weights = weights
        self.sizes = [len(weight.w) for weight in weights]
        across = torch.cat([weight.directions for weight in weights])
        count, n = across.shape
        self.basis = torch.stack([torch.ones_like(across), across], 1).mul_(n**-0.5)
        kind = across.dtype, across.device
        # A row's numbers are those of all rows, times its own factor, of which only fractions count.
        factors = _random(count, 1, *kind) + 2
        self.probes = (_random(PROBES, n, *kind).unsqueeze(1) * factors).mul_(500).frac_()
        self.probes[:2].add_(self.basis.transpose(0, 1), alpha=_WEIGHT_OF_BASIS)

    def probes_of(self) -> Iterator[Tensor]:
        """Yield the probes of each weight, (PROBES, *shape)."""
        for weight, probes in zip(self.weights, torch.split(self.probes, self.sizes, 1), strict=True):
            yield probes.view(PROBES, *weight.w.shape)

    def measure(self, images: Iterator[Tensor], of_gains: Iterator[Tensor]) -> None:
        """Measure what `find_forms` reads, given Jᵀ of all probes, (PROBES, *shape) of each weight and of each gain."""
        found = torch.cat([next(images).flatten(2) for _ in self.weights], 1)
        rows = torch.cat([self.probes.transpose(0, 1), found.transpose(0, 1)], 1)  # (R, 2·PROBES, n)
        lengths = torch.linalg.vector_norm(rows, dim=2)
        inside = torch.bmm(rows, self.basis.mT)
        rows.baddbmm_(inside, self.basis, alpha=-1)
        given, found = torch.split(rows, PROBES, 1)
        scale = ((given * found).sum((1, 2)) / given.square().sum((1, 2))).unsqueeze(1)
        errors = torch.linalg.vector_norm(found.addcmul_(given, scale.unsqueeze(2), value=-1), dim=2)
        of_gain = [next(of_gains).flatten(1) for weight in self.weights if weight.gain is not None]
        gains = torch.cat(of_gain, 1).mT if of_gain else scale.new_zeros(()).expand(len(scale), PROBES)
        self.measured = torch.cat([scale, errors, lengths, inside.flatten(1), gains], 1)
        del self.probes


def measure(weights: Sequence[Weight | Derived]) -> list[EqualRows]:
    """Return rows that are measured, those that are equally long together. No two q share a parameter."""
    kinds: dict[tuple[int, bool], list[Weight | Derived]] = {}
    for weight in weights:
        kinds.setdefault((weight.directions.shape[1], weight.gain is None), []).append(weight)
    parts = [EqualRows(alike) for alike in kinds.values()]
    ordered = [weight for part in parts for weight in part.weights]
    parameters = [*(each.w for each in ordered), *(each.gain for each in ordered if each.gain is not None)]
    probes = [each for part in parts for each in part.probes_of()]
    with OWN_GRADIENTS.taken(), no_autocast(ordered[0].w.device.type):
        given = _gradients([each.q for each in ordered], parameters, probes)
    pairs = zip(parameters, given, strict=True)
    found = [p.new_zeros(PROBES, *p.shape) if gradients is None else gradients for p, gradients in pairs]
    images, of_gains = iter(found[: len(ordered)]), iter(found[len(ordered) :])
    for part in parts:
        part.measure(images, of_gains)
    return parts


def find_forms(parts: Sequence[EqualRows]) -> tuple[Tensor, Tensor, Tensor]:
    """Find the forms of weights that were measured. Return scale and inner of all rows, and which fit."""
    sizes = [1, PROBES, PROBES, PROBES, 4 * PROBES, PROBES]
    each = torch.split(torch.cat([part.measured for part in parts]), sizes, 1)
    scale, errors, before, after, inside, of_gains = each
    given, found = torch.split(inside.view(-1, 2 * PROBES, 2), PROBES, 1)
    # What a linear map of the parts inside is to give: parts inside, and the gradient of the gain.
    found = torch.cat([found, of_gains.unsqueeze(2)], 2)  # (R, PROBES, 3)
    first, second, third, fourth = given[:, :2].flatten(1).unbind(1)
    inverse = torch.stack([fourth, -second, -third, first], 1).view(-1, 2, 2)
    turned = inverse @ found[:, :2] / (first * fourth - second * third).view(-1, 1, 1)
    inner, gain = turned[:, :, :2].mT - scale.unsqueeze(2) * _identity(scale), turned[:, :, 2]
    missed = found - given @ turned
    errors = (errors.square() + missed[:, :, :2].square().sum(2)).sqrt()
    fits = (errors <= _TOLERANCE * (after + scale.abs() * before)).all(1)
    fits &= (missed[:, :, 2].abs() <= _TOLERANCE * gain.norm(dim=1, keepdim=True) * before).all(1)
    scale = scale.squeeze(1).where(fits, torch.nan)
    counts = [len(part.measured) for part in parts]
    numbers = (torch.split(each, counts) for each in (scale, inner, gain, fits))
    for part, scales, inners, of_gain, part.fits in zip(parts, *numbers, strict=True):
        part.form = RowForm(scales, inners, of_gain, part.basis)
        del part.measured
    return scale, inner, fits


def _gradients(qs: Sequence[Tensor], parameters: Sequence[Tensor], rows: Sequence[Tensor]) -> Sequence[Any]:
    """Return the parameters' gradients for rows of gradients of each q, by one vjp; None for those that have none."""
    options: dict[str, bool] = {"retain_graph": True, "allow_unused": True}
    try:
        return torch.autograd.grad(qs, parameters, rows, is_grads_batched=True, **options)
    except RuntimeError:  # an operator that vmap has no rule for
        each = [torch.autograd.grad(qs, parameters, row, **options) for row in zip(*rows, strict=True)]
    return [None if values[0] is None else torch.stack(values) for values in zip(*each, strict=True)]


@device_cache(64)
def _random(count: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers from -1 to 1, (count, n), always the same.

    They are drawn by no generator, which CUDA graphs would have to know of.
    """
    numbers = torch.arange(1, count * n + 1, dtype=torch.float64, device=device)
    return numbers.mul_(12.9898).sin_().mul_(43758.5453).frac_().to(dtype).view(count, n)


class Later(Contribution):
    """A contribution that is known once the derivatives of all layers are known. Rare uses read its values."""

    __slots__ = ()
    kind = "derived"


class PulledBack(Later):
    """Per-sample gradients of a parameter, held as those of q, (B, *q.shape), which is made of it.

    Uses of one q add up first, because all of them are pulled back by the same derivative: a position bias that every
    block adds to its scores is pulled back once a step, not once a block.
    """

    __slots__ = ("batch_size", "parameter", "pull", "q", "rows", "version")
    decision = Decision(KEEP, "the gradients of what is made of it are pulled back together")

    def __init__(self, q: Tensor, parameter: Tensor, rows: Tensor, pull: Pull) -> None:
        self.q, self.parameter, self.rows, self.pull = q, parameter, rows, pull
        self.version = parameter._version
        self.batch_size = len(rows)

    @property
    def is_borrowed(self) -> bool:
        return True  # autograd may give out a tensor that repeats its elements

    def check_unchanged(self, name: str) -> None:
        if self.parameter._version != self.version:
            refuse_changed(name)

    def absorb(self, other: Contribution, dtype: torch.dtype) -> bool:
        if not isinstance(other, PulledBack) or other.q is not self.q:
            return False
        self.rows = self.rows + other.rows
        return True

    def materialise(self) -> Tensor:
        (found,) = self.pull(self.q, [self.parameter], self.rows)
        return self.parameter.new_zeros(len(self.rows), *self.parameter.shape) if found is None else found

    def kept_product(self) -> Tensor:
        return self.materialise()


class Derived(Later):
    """Per-sample gradients Jᵀv_b of a weight, held as those of q, which is made of it, and of a gain if there is one.

    products: (B, 3, O) float64, ‖v_bo‖² and Eᵀv_bo. tell: is told of the verdict on the weight's rows.
    """

    __slots__ = (
        "__weakref__", "at", "batch_size", "directions", "gain", "inner", "products", "q", "rows", "squares", "tell",
        "versions", "w", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        patches: Patches,
        q: Tensor,
        w: Tensor,
        gain: Tensor | None,
        tell: Callable[[Verdict, slice], None],
        waiting: list[ref[Derived]],
    ) -> None:
        self.q, self.w, self.gain, self.tell, self.waiting = q, w, gain, tell, waiting
        self.versions = self._versions()
        self.directions = directions_of(w)
        values, self.products = patches.products_along(self.directions, keep=patches.decision.path == KEEP)
        self.inner: Patches | Kept = patches if values is None else Kept(values)
        self.rows: EqualRows | None = None
        self.at = _ALL  # of those rows
        self.squares: Tensor | None = None
        self.batch_size = patches.batch_size
        waiting.append(ref(self))

    def _versions(self) -> tuple[int, int]:
        return self.w._version, 0 if self.gain is None else self.gain._version

    def is_as_recorded(self) -> bool:
        return self._versions() == self.versions

    def launch_key(self) -> tuple[object, ...]:
        return (Derived,)

    def check_unchanged(self, name: str) -> None:
        if self.rows is None and not self.is_as_recorded():
            refuse_changed(name)
        self.inner.check_unchanged(name)

    def materialise(self) -> Tensor:
        form = self.known()
        return form.applied(self.inner.materialise().to(form.scale.dtype))

    def square_parts(self) -> Tensor | None:
        if self.rows is None:
            _find(self.waiting)
        return self.squares

    def clipped_sum(self, scale: Tensor, out: Tensor | None) -> Tensor:
        return self.clipped_sums([self], scale.unsqueeze(0), [0], [out])[0]

    def clipped_sums(
        self, members: list[Any], scale: Tensor, rows: Sequence[int], outs: Outs, *, let_go_together: bool = False
    ) -> list[Tensor]:
        kept = [(row, member) for row, member in zip(rows, members, strict=True) if type(member.inner) is Kept]
        values = [member.inner.values for _, member in kept]
        made = iter(kept_sums(values, scale, rows=[row for row, _ in kept]) if kept else [])
        del values
        totals: dict[Derived, Tensor] = {}
        for row, member in zip(rows, members, strict=True):
            member.square_parts()
            alone = member.inner.values is None
            totals[member] = member.inner.clipped_sum(scale[row], None) if alone else next(made)
            del member.inner  # x and g, if nobody else holds them
        for alike in dict.fromkeys(member.rows for member in members):
            own = sorted((member for member in members if member.rows is alike), key=lambda member: member.at.start)
            whole = torch.cat([totals[member].flatten(1) for member in own]).unsqueeze(0)
            if len(own) == len(alike.sizes):
                form = alike.form
            else:
                form = RowForm(*map(torch.cat, zip(*(member.known() for member in own), strict=True)))
            # Where rows have another form no sample has a share: their sum is zero, and not 0 · NaN.
            sums = form.applied(whole)[0].masked_fill_(form.scale.isnan().unsqueeze(1), 0)
            pieces = torch.split(sums, [len(member.w) for member in own])
            totals |= {member: piece.view(member.w.shape) for member, piece in zip(own, pieces, strict=True)}
        found = zip((totals[member] for member in members), outs, strict=True)
        return [total if out is None else out.add_(total) for total, out in found]

    def of_gain(self) -> Tensor:
        """Return the per-sample gradients of the gain, (B, *its shape)."""
        form = self.known()
        assert self.gain is not None
        rows = torch.einsum("bko,ok->bo", self.products[:, 1:], form.gain.double())
        rows = torch.where(form.scale.isnan(), torch.nan, rows)
        return rows.to(self.gain.dtype).view(-1, *self.gain.shape)

    def known(self) -> RowForm:
        self.square_parts()
        assert self.rows is not None
        return RowForm(*(each[self.at] for each in self.rows.form))


class OfGain(Later):
    """Per-sample gradients of the gain of a derived weight."""

    __slots__ = ("batch_size", "weight")

    def __init__(self, weight: Derived) -> None:
        self.weight, self.batch_size = weight, weight.batch_size

    def check_unchanged(self, name: str) -> None:
        self.weight.check_unchanged(name)

    def materialise(self) -> Tensor:
        return self.weight.of_gain()


class WeightDerivative:
    """Derivative of the weight behind one use of what is made of it, as far as verdicts tell."""

    def __init__(self) -> None:
        self._verdict: Verdict | None = None  # whether the derivative has the closed form
        self._rows = _ALL  # of the verdict

    def contributions(self, engine: Engine, q: Tensor, patches: Patches) -> list[tuple[Slot, Contribution]]:
        """Return q's gradients in place of those of the weight that q is made of, if that is exact; otherwise nothing.

        Besides the weight there may be a gain, with one element a row.
        """
        slots = slots_behind(engine, q) if patches.by_kernel else []
        weight = self._weight_in_rows(q, [slot.parameter for slot in slots], patches.batch_size)
        gains = [slot for slot in slots if slot.parameter is not weight]
        alike = all(slot.parameter.numel() == len(q) and slot.parameter.dtype == q.dtype for slot in gains)
        if weight is None or len(gains) > 1 or not alike:
            return []
        gain = gains[0].parameter if gains else None
        if self._verdict is None and self._form(q, weight, gain) is None:
            return []
        derived = Derived(patches, q, weight, gain, self._hear, _waiting.setdefault(engine, []))
        return [(engine.slot(weight), derived), *((slot, OfGain(derived)) for slot in gains)]

    def pulled_back(self, q: Tensor, parameters: list[nn.Parameter], rows: Tensor) -> Sequence[Tensor | None]:
        """Return the gradients (B, *shape) of the parameters that q is made of, given those of q, (B, *q.shape)."""
        weight = self._weight_in_rows(q, parameters, len(rows))
        form = None if weight is None else self._form(q, weight, None)
        if weight is None or form is None:
            return _vjp(q, parameters, rows)
        others = [each for each in parameters if each is not weight]
        found = iter(_vjp(q, others, rows) if others else [])
        return [form.applied(rows) if each is weight else next(found) for each in parameters]

    def _weight_in_rows(self, q: Tensor, parameters: list[nn.Parameter], batch: int) -> nn.Parameter | None:
        """Return the one parameter of q's shape, if its derivative may have a closed form."""
        alike = [each for each in parameters if each.shape == q.shape and each.dtype == q.dtype]
        wide = q.dim() > 1 and q.dtype.itemsize >= 4 and q.shape[1:].numel() >= 4 * PROBES
        refuted = self._verdict is not None and self._verdict.is_no(self._rows)
        if len(alike) != 1 or not wide or batch <= PROBES or refuted or dry_run.current() is not None:
            return None
        return alike[0]

    def _form(self, q: Tensor, weight: nn.Parameter, gain: nn.Parameter | None) -> RowForm | None:
        """Return the closed form, or None if there is none; wait for the first verdict."""
        (found,) = measure([Weight(q, weight, gain, directions_of(weight))])
        find_forms([found])
        if own_capture() is not None:
            return found.form
        first = self._verdict is None
        self._hear(Verdict(found.fits), _ALL)
        assert self._verdict is not None
        return None if (first and not bool(found.fits.all())) or self._verdict.is_no(self._rows) else found.form

    def _hear(self, verdict: Verdict, rows: slice) -> None:
        """Record whether the derivative has the closed form, once the last verdict is known."""
        if self._verdict is None or self._verdict.has_come():
            self._verdict, self._rows = verdict, rows


def slots_behind(engine: Engine, q: Tensor) -> list[Slot]:
    """Return the slots of the trained parameters that q is made of."""
    return [engine.slot(leaf) for leaf in leaves_behind([q]) if leaf.requires_grad]


def _vjp(q: Tensor, parameters: list[nn.Parameter], rows: Tensor) -> Sequence[Any]:
    """Return the parameters' gradients for rows of gradients of q; None for those that have none."""
    with OWN_GRADIENTS.taken():
        return _gradients([q], parameters, [rows])


def _find(waiting: list[ref[Derived]]) -> None:
    """Find the derivatives of weights that wait for them, all together, and the norms that follow."""
    kinds: dict[tuple[object, ...], list[Derived]] = {}
    for each in waiting:
        if (member := each()) is not None and member.is_as_recorded():
            kinds.setdefault((member.w.dtype, member.w.device, member.products.shape[0]), []).append(member)
    waiting.clear()
    for alike in kinds.values():
        _find_alike(alike)


def _parts(members: list[Derived]) -> Iterator[list[Derived]]:
    """Yield members with at most `_AT_ONCE` elements together, one at least, and no parameter twice."""
    part: list[Derived] = []
    taken: set[int] = set()
    size = 0
    for each in sorted(members, key=lambda member: member.directions.shape[1]):
        own = {id(each.w), id(each.gain)} - {id(None)}
        if part and (size + each.w.numel() > _AT_ONCE or taken & own):
            yield part
            part, taken, size = [], set(), 0
        part.append(each)
        taken |= own
        size += each.w.numel()
    yield part


def _find_alike(members: list[Derived]) -> None:
    parts = [rows for some in _parts(members) for rows in measure(some)]
    scale, inner, fits = find_forms(parts)
    verdict = None if own_capture() is not None else Verdict(fits)  # a replayed graph tells nobody: NaN stays NaN
    members = [member for part in parts for member in part.weights]
    products = torch.cat([member.products for member in members], 2)
    products[:, 1:] *= torch.cat([part.basis[:, 0, 0] for part in parts])  # vectors of length one, not √n
    sizes = [size for part in parts for size in part.sizes]
    squares = torch.split(squares_of(scale, inner, products), sizes, 1)
    norms = zip(squares, torch.split(products, sizes, 2), strict=True)
    first = 0
    for part in parts:
        begin = 0
        for member, size in zip(part.weights, part.sizes, strict=True):
            member.rows, member.at = part, slice(begin, begin + size)
            member.squares, member.products = next(norms)
            if verdict is not None:
                member.tell(verdict, slice(first + begin, first + begin + size))
            begin += size
            del member.q, member.directions
        first += begin
        part.weights = ()


_waiting: WeakKeyDictionary[Any, list[ref[Derived]]] = WeakKeyDictionary()  # by engine
