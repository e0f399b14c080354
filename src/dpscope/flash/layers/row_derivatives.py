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
samples' gradients of w need not be made at all (`Derived`). The probes of all layers are pulled back together, when the
first norm is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscope.flash.gradients.contributions import Contribution, Kept, refuse_changed
from dpscope.flash.gradients.paths import KEEP, Decision
from dpscope.flash.gradients.slots import OWN_GRADIENTS, Slot
from dpscope.flash.layers.conv import Patches
from dpscope.flash.taps.recorder import Engine
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.autocast import no_autocast
from dpscope.flash.torch_side.autograd_graph import leaves_behind
from dpscope.flash.torch_side.captures import own_capture

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

    def squares(self, products: Tensor) -> Tensor:
        """Return ‖Jᵀv_bo‖², (B, O), from ‖v_bo‖² and Eᵀv_bo: (B, 3, O) float64.

        Jᵀv has two orthogonal parts, a (v - EEᵀv) and E (a + N) Eᵀv. Where little of v is outside of E, rounding is
        all that is known of the first: it is taken to be at least `LEAST_OUTSIDE` of v, which only clips more.
        """
        squares, along = products[:, 0], products[:, 1:].transpose(1, 2)  # (B, O), (B, O, 2)
        outside = torch.maximum(squares - along.square().sum(2), LEAST_OUTSIDE * squares)
        scale = self.scale.double()
        inner = self.inner.double() + scale.view(-1, 1, 1) * _identity(scale)
        inside = torch.einsum("oij,boj->boi", inner, along).square().sum(2)
        return scale.square() * outside + inside


def _identity(like: Tensor) -> Tensor:
    return torch.eye(2, dtype=like.dtype, device=like.device)


def directions_of(w: Tensor) -> Tensor:
    """Return (O, n): w_o less its mean, of length one; zeros where nothing is left. The constant vector is beside it.

    One operator makes them, because there is one call for each layer.
    """
    flat = w.detach().flatten(1)
    n = flat.shape[1]
    return F.layer_norm(flat, (n,), eps=torch.finfo(flat.dtype).tiny).mul_(n**-0.5)


def row_forms(
    qs: Sequence[Tensor], weights: Sequence[Tensor], gains: Sequence[Tensor | None], directions: Sequence[Tensor]
) -> list[EqualRows]:
    """Return the forms of all weights, those with equally long rows together. No two q share a parameter."""
    lengths: dict[int, list[int]] = {}
    for at, direction in enumerate(directions):
        lengths.setdefault(direction.shape[1], []).append(at)
    most = max(sum(weights[at].numel() for at in places) for places in lengths.values())
    noise = _random(PROBES * most, directions[0])
    groups = [EqualRows(places, weights, directions, noise) for places in lengths.values()]
    probes = dict(pair for group in groups for pair in group.probes_of(weights))
    parameters = [*weights, *(gain for gain in gains if gain is not None)]
    found = iter(_pulled(qs, parameters, [probes[at] for at in range(len(weights))]))
    images = [next(found) for _ in weights]
    of_gains = [None if gain is None else next(found) for gain in gains]
    for group in groups:
        group.measure(images, of_gains)
    return groups


class EqualRows:
    """Weights whose rows are equally long, one after the other: R rows of n elements, in the order of `places`.

    form: of all these rows, and `fits`, (R,): which have it. Both are known once they are measured.
    """

    form: RowForm
    fits: Tensor

    def __init__(
        self, places: list[int], weights: Sequence[Tensor], directions: Sequence[Tensor], noise: Tensor
    ) -> None:
        self.places = places
        self.sizes = [len(weights[at]) for at in places]
        across = torch.cat([directions[at] for at in places])
        self._basis = torch.stack([torch.full_like(across, across.shape[1] ** -0.5), across], 1)
        self._probes = noise[: PROBES * across.numel()].view(PROBES, *across.shape).clone()
        self._probes[:2].add_(self._basis.transpose(0, 1), alpha=_WEIGHT_OF_BASIS)

    def split(self, rows: Tensor, dim: int = 0) -> Sequence[Tensor]:
        """Return the rows of each weight."""
        return torch.split(rows, self.sizes, dim)

    def probes_of(self, weights: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield the place of each weight with its probes, (PROBES, *shape)."""
        for at, probes in zip(self.places, self.split(self._probes, 1), strict=True):
            yield at, probes.view(PROBES, *weights[at].shape)

    def measure(self, images: Sequence[Tensor], of_gains: Sequence[Tensor | None]) -> None:
        """Find the form, given Jᵀ of all probes, (PROBES, *shape) of each weight and of each gain."""
        basis, found = self._basis, torch.cat([images[at].flatten(2) for at in self.places], 1)
        rows = torch.cat([self._probes.transpose(0, 1), found.transpose(0, 1)], 1)  # (R, 2·PROBES, n)
        lengths = torch.linalg.vector_norm(rows, dim=2)
        inside = torch.bmm(rows, basis.mT)
        rows.baddbmm_(inside, basis, alpha=-1)
        given, found = rows[:, :PROBES], rows[:, PROBES:]
        scale = (given * found).sum((1, 2)) / given.square().sum((1, 2))
        errors = torch.linalg.vector_norm(found - scale.view(-1, 1, 1) * given, dim=2)
        # What a linear map of the parts inside is to give: parts inside, and the gradient of the gain.
        given, found = inside[:, :PROBES], torch.cat([inside[:, PROBES:], self._of(of_gains)], 2)  # (R, PROBES, 2 or 3)
        (first, second), (third, fourth) = (given[:, k].unbind(1) for k in (0, 1))
        inverse = torch.stack([fourth, -second, -third, first], 1).view(-1, 2, 2)
        turned = inverse @ found[:, :2] / (first * fourth - second * third).view(-1, 1, 1)
        inner, gain = turned[:, :, :2].mT - scale.view(-1, 1, 1) * _identity(scale), turned[:, :, 2]
        missed = found - given @ turned
        errors = (errors.square() + missed[:, :, :2].square().sum(2)).sqrt()
        allowed = lengths[:, PROBES:] + scale.abs().unsqueeze(1) * lengths[:, :PROBES]
        fits = (errors <= _TOLERANCE * allowed).all(1)
        fits &= (missed[:, :, 2].abs() <= _TOLERANCE * gain.norm(dim=1, keepdim=True) * lengths[:, :PROBES]).all(1)
        self.form, self.fits = RowForm(scale.where(fits, torch.nan), inner, gain, basis), fits
        del self._probes

    def _of(self, gains: Sequence[Tensor | None]) -> Tensor:
        """Return the gradients of the gains, (R, PROBES, 1); zeros without a gain."""
        each = [gains[at] for at in self.places]
        if not any(gradients is not None for gradients in each):
            return self._basis.new_zeros(()).expand(sum(self.sizes), PROBES, 1)
        columns = [
            self._basis.new_zeros(PROBES, size) if gradients is None else gradients.flatten(1)
            for size, gradients in zip(self.sizes, each, strict=True)
        ]
        return torch.cat(columns, 1).mT.unsqueeze(2)


def _pulled(qs: Sequence[Tensor], parameters: Sequence[Tensor], probes: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the gradients of the parameters for all probes, (PROBES, *shape) for each q; zeros where there is none."""
    with OWN_GRADIENTS.taken(), no_autocast(qs[0].device.type):
        found = _gradients(qs, parameters, probes)
    return [
        parameter.new_zeros(PROBES, *parameter.shape) if gradients is None else gradients
        for parameter, gradients in zip(parameters, found, strict=True)
    ]


def _gradients(qs: Sequence[Tensor], parameters: Sequence[Tensor], rows: Sequence[Tensor]) -> Sequence[Any]:
    """Return the parameters' gradients for rows of gradients of each q, by one vjp; None for those that have none."""
    options: dict[str, bool] = {"retain_graph": True, "allow_unused": True}
    try:
        return torch.autograd.grad(qs, parameters, rows, is_grads_batched=True, **options)
    except RuntimeError:  # an operator that vmap has no rule for
        each = [torch.autograd.grad(qs, parameters, row, **options) for row in zip(*rows, strict=True)]
    return [None if values[0] is None else torch.stack(values) for values in zip(*each, strict=True)]


def _random(count: int, like: Tensor) -> Tensor:
    """Return numbers from -1 to 1, always the same: by no generator, which CUDA graphs would have to know of."""
    return (
        torch.arange(count, dtype=torch.float64, device=like.device)
        .mul_(12.9898)
        .sin_()
        .mul_(43758.5453)
        .frac_()
        .to(like)
    )


class Later(Contribution):
    """A contribution that is known once the derivatives of all layers are known. Rare uses read its values."""

    __slots__ = ()
    kind = "derived"


class PulledBack(Later):
    """Per-sample gradients of a parameter, held as those of q, (B, *q.shape), which is made of it.

    Uses of one q add up first, because all of them are pulled back by the same derivative: a position bias that every
    block adds to its scores is pulled back once a step, not once a block.
    """

    __slots__ = ("parameter", "pull", "q", "rows", "version")
    decision = Decision(KEEP, "the gradients of what is made of it are pulled back together")

    def __init__(self, q: Tensor, parameter: Tensor, rows: Tensor, pull: Pull) -> None:
        self.q, self.parameter, self.rows, self.pull = q, parameter, rows, pull
        self.version = parameter._version

    @property
    def batch_size(self) -> int:
        return len(self.rows)

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
        "__weakref__", "directions", "form", "gain", "inner", "others", "products", "q", "squares", "tell", "versions",
        "w",
    )  # fmt: skip

    def __init__(
        self,
        patches: Patches,
        q: Tensor,
        w: Tensor,
        gain: Tensor | None,
        tell: Callable[[Verdict, slice], None],
        others: Unknown,
    ) -> None:
        self.q, self.w, self.gain, self.tell, self.others = q, w, gain, tell, others
        self.versions = self._versions()
        self.directions = directions_of(w)
        values, self.products = patches.products_along(self.directions, keep=patches.decision.path == KEEP)
        self.inner: Patches | Kept = patches if values is None else Kept(values)
        self.form: RowForm | None = None
        self.squares: Tensor | None = None
        others.members.append(ref(self))

    def _versions(self) -> tuple[int, int]:
        return self.w._version, 0 if self.gain is None else self.gain._version

    def is_as_recorded(self) -> bool:
        return self._versions() == self.versions

    @property
    def batch_size(self) -> int:
        return self.inner.batch_size

    def check_unchanged(self, name: str) -> None:
        if self.form is None and not self.is_as_recorded():
            refuse_changed(name)
        self.inner.check_unchanged(name)

    def materialise(self) -> Tensor:
        form = self._known()
        return form.applied(self.inner.materialise().to(form.scale.dtype))

    def square_parts(self) -> Tensor | None:
        self._known()
        return self.squares

    def clipped_sum(self, scale: Tensor, out: Tensor | None) -> Tensor:
        return self.from_sum(self.inner.clipped_sum(scale, None), out)

    def from_sum(self, total: Tensor, out: Tensor | None) -> Tensor:
        """Return the clipped sum, given that of q, added into `out` where given."""
        total = self._known().applied(total.unsqueeze(0)).squeeze(0)
        return total if out is None else out.add_(total)

    def of_gain(self) -> Tensor:
        """Return the per-sample gradients of the gain, (B, *its shape)."""
        form = self._known()
        assert self.gain is not None
        rows = torch.einsum("bko,ok->bo", self.products[:, 1:], form.gain.double())
        rows = torch.where(form.scale.isnan(), torch.nan, rows)
        return rows.to(self.gain.dtype).view(-1, *self.gain.shape)

    def _known(self) -> RowForm:
        if self.form is None:
            self.others.find()
        assert self.form is not None
        return self.form


class OfGain(Later):
    """Per-sample gradients of the gain of a derived weight."""

    __slots__ = ("weight",)

    def __init__(self, weight: Derived) -> None:
        self.weight = weight

    @property
    def batch_size(self) -> int:
        return self.weight.batch_size

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
        derived = Derived(patches, q, weight, gain, self._hear, unknown_of(engine))
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
        (found,) = row_forms([q], [weight], [gain], [directions_of(weight)])
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


class Unknown:
    """Weights whose derivatives are not known yet; they are computed together."""

    def __init__(self) -> None:
        self.members: list[ref[Derived]] = []

    def find(self) -> None:
        members = [member for each in self.members if (member := each()) is not None]
        self.members = []
        for some in _parts([each for each in members if each.is_as_recorded()]):
            _find(some)


def _parts(members: list[Derived]) -> Iterator[list[Derived]]:
    """Yield members of one kind, with at most `_AT_ONCE` elements together, one at least, and no parameter twice."""
    kinds: dict[tuple[object, ...], list[Derived]] = {}
    for each in members:
        kinds.setdefault((each.w.dtype, each.w.device, each.products.shape[0]), []).append(each)
    for alike in kinds.values():
        part: list[Derived] = []
        taken: set[int] = set()
        size = 0
        for each in alike:
            own = {id(each.w), id(each.gain)} - {id(None)}
            if part and (size + each.w.numel() > _AT_ONCE or taken & own):
                yield part
                part, taken, size = [], set(), 0
            part.append(each)
            taken |= own
            size += each.w.numel()
        yield part


def _find(members: list[Derived]) -> None:
    """Find the derivatives of some weights, and the norms that follow."""
    given = [each.q for each in members], [each.w for each in members], [each.gain for each in members]
    groups = row_forms(*given, [each.directions for each in members])
    verdict = None  # a replayed graph tells nobody: its samples have no share where rows do not fit
    if own_capture() is None:
        verdict = Verdict(torch.cat([group.fits for group in groups]))
    seen = 0
    for group in groups:
        own = [members[at] for at in group.places]
        products = torch.cat([member.products for member in own], 2)
        products[:, 1] *= group.form.basis.shape[2] ** -0.5  # the constant vector is of length one
        forms = zip(*(group.split(each) for each in group.form), strict=True)
        squares = group.split(group.form.squares(products), 1)
        for member, form, squared, along in zip(own, forms, squares, group.split(products, 2), strict=True):
            member.form, member.squares, member.products = RowForm(*form), squared, along
            if verdict is not None:
                member.tell(verdict, slice(seen, seen + len(member.w)))
            seen += len(member.w)
            del member.q, member.directions


_unknown: WeakKeyDictionary[Any, Unknown] = WeakKeyDictionary()


def unknown_of(engine: Any) -> Unknown:
    return _unknown.setdefault(engine, Unknown())
