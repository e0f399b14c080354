"""Parameters that a module of no family owns itself: followed to the operators that use them.

While the module's forward runs, each of its own parameters is a proxy, `Bare`, and every torch function that is
given one comes to `follow`. There are two kinds of results:

- of parameters and constants alone (a slice, a transpose, a cast, a normalised weight): another proxy;
- of samples, one row each: an ordinary tensor, y. The operator is a *use* of the parameter, and is treated as a layer:
  y[b] is computed from the parameter and row b of the other operands (tried out on random numbers: bare_use.py).
  Backward gives the use's per-sample gradients, and the self-test finds out whether row b belongs to sample b.

The module's own layers are tapped as usual. If a use cannot be followed (`NotFollowed`), the whole module runs sample
by sample (opaque.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from dpscope.errors import UserError
from dpscope.flash.layers.bare_gradients import STEPS_BACK, flatten, key_of, rebuild, slot_of, step_back
from dpscope.flash.layers.bare_use import (
    BareUse,
    Constant,
    Expanded,
    Unrelated,
    apply_used,
    learn,
    name_of,
    operands_of,
    rows_of_a_sample,
)
from dpscope.flash.sample_rows.proxy import NotFollowed, Proxy
from dpscope.flash.taps.recorder import Engine
from dpscope.flash.taps.taps import TapOfSamples, refuse_replaced
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.autograd_graph import current_hooks, leaves_behind, without_hooks
from dpscope.flash.torch_side.frames import in_graph, outside_graphs
from dpscope.flash.torch_side.instance_method import InertHook, instance_method
from dpscope.flash.torch_side.own_functions import torchs_own


class Bare(Proxy):
    """Proxy for `plain`, a function of parameters alone, with its history.

    Gradients that reach it without a use pass to the parameter, which refuses them.
    """

    tap: BareTap

    @staticmethod
    def of(plain: Tensor, tap: BareTap) -> Bare:
        """Return a proxy. Call this with gradients enabled."""
        proxy = (plain if dry_run.current() is None else dry_run.placeholder(plain)).as_subclass(Bare)
        proxy.plain, proxy.tap = plain, tap
        return proxy

    @property
    def origin(self) -> str:
        """The name of the parameter that it is, or is a view of."""
        base = self.plain._base
        slot = slot_of(self.tap, self.plain if base is None else base)
        return "" if slot is None else slot.name

    def samples(self, consumer: nn.Module | None = None) -> Tensor:
        tap, plain, row = self.tap, self.plain, self
        batch = tap.batch()
        rows = plain.shape[0] if plain.dim() else 0
        if rows == batch and (batch <= 1 or plain.stride(0) == 0):  # equal rows
            row = Bare.of(plain[:1], tap) if batch else self
        elif rows != 1:
            shape = tuple(plain.shape)
            reason = (
                f"a layer is given a tensor of shape {shape}, made of parameters and no rows of the {batch} samples"
            )
            raise tap.cannot_follow(reason, consumer)
        if consumer is not None:
            tap.engine.verification.expanded.add(consumer)
        key = expand_rows, plain.dim(), row.origin
        role = tap.roles.get(key) or tap.roles.setdefault(key, BareUse(tap, expand_rows, [False, False]))
        assert isinstance(role, BareUse)
        answer: Tensor = tap.apply(role, expand_rows, *flatten((row, batch), {}))
        return answer

    def batch(self) -> int:
        return self.tap.batch()

    def derive(self, tensor: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.tap.proxy_of(tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_follow_outside_graphs if in_graph() else follow)(func, args, kwargs or {})


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return v · g / |v|. Torch's own writes past the end of its memory if g has another shape, as in a trial."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


_CHECKED: dict[Any, Any] = {torch._weight_norm: _weight_norm}

_Places = list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None]]
_BEYOND = frozenset(("__set__", "register_hook", "retain_grad", "backward", "requires_grad_", "share_memory_"))


def follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` with proxies among its operands and return its result."""
    func = torchs_own(func)
    name, writes = _known(func)
    if name == "__get__":  # p.shape, p.dtype, p.device: asked often
        value = func(args[0].plain)
        if not isinstance(value, Tensor):
            return value
    func = _CHECKED.get(func, func)
    leaves, form = flatten(args, kwargs)
    tap: Any = None
    others = False
    for leaf in leaves:  # a plain loop: this runs for every operator
        if type(leaf) is Bare:
            tap = tap or leaf.tap
        elif isinstance(leaf, Tensor):
            others = True
    if not torch.is_grad_enabled():
        return _call(func, leaves, form)
    if name in _BEYOND or kwargs.get("out") is not None or torch._C._functorch.maybe_current_level() is not None:
        raise tap.cannot_follow(f"{name} is called on a parameter")
    if writes:
        return _write(tap, name, args, kwargs)
    return tap.use(func, leaves, form) if others else tap.derive(func, leaves, form)


_follow_outside_graphs = outside_graphs(
    "flash clipping: a parameter is followed to the operators that use it, outside of graphs"
)(follow)


@lru_cache(1024)
def _known(func: Any) -> tuple[str, bool]:
    """Return a function's name, and whether it writes."""
    name = getattr(func, "__name__", "")
    return name, name[-1:] == "_" and (name[-2:] != "__" or name in _WRITING)


def _is_plain(result: object) -> bool:
    """Return whether it is a tensor and not a proxy; tensors of a dry run have a class of their own."""
    if type(result) is Tensor or isinstance(result, nn.Parameter):
        return True
    return dry_run.current() is not None and isinstance(result, Tensor)


def _call(func: Any, leaves: list[Any], form: Any) -> Any:
    args, kwargs = rebuild([leaf.plain if type(leaf) is Bare else leaf for leaf in leaves], form)
    return func(*args, **kwargs)


_WRITING = {
    f"__i{name}__": f"__{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "matmul")
} | {"__setitem__": ""}


def _with_item(x: Tensor, index: Any, value: Tensor) -> Tensor:
    y = x.clone()
    y[index] = value
    return y


def _write(tap: BareTap, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do x.add_(p) as x.copy_(x + p), so that every view of x has the use behind it."""
    target = args[0]
    plain = getattr(Tensor, _WRITING.get(name, name[:-1]), None) if name != "__setitem__" else _with_item
    if type(target) is Bare or not isinstance(target, Tensor) or plain is None or name == "copy_":
        raise tap.cannot_follow(f"a parameter is used by {name}")
    value = follow(plain, (target.clone(), *args[1:]), kwargs)
    if type(value) is Bare:
        raise tap.cannot_follow(f"a parameter is written into a constant by {name}")
    target.copy_(value)
    return None if name == "__setitem__" else target


class BareTap(TapOfSamples):
    """The forward of a module that owns parameters itself, its own children apart."""

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(engine, name, module)
        self.places = [(owner._parameters, key, p) for owner, key, p in own_parameters(module)]
        self.roles: dict[Any, BareUse | Constant | Expanded | Unrelated] = {}
        self.constants: set[Any] = set()  # operators that were found to meet nothing of the samples
        self.repeats: dict[Any, bool] = {}  # rows of parameters that are repeated: as often as there are samples?
        self._found_constant = False
        self.hooks: Any = None  # on saved tensors, where the module's forward began
        self._early: _Places | None = None  # proxies that a hook has put in place, before forward
        self._handles: list[RemovableHandle] = []

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        if not any(parameter.requires_grad for _, _, parameter in self.places):
            return self.original(*args, **kwargs)
        self.engine.forwards.batch_for(self, args, kwargs)
        outer, self.hooks = self.hooks, current_hooks()
        before = self._early or self._put_proxies()
        self._early = None
        try:
            return self.original(*args, **kwargs)
        finally:
            self.hooks = outer
            self._take_off(before)

    def _put_proxies(self) -> _Places:
        before: _Places = []
        for owned, key, parameter in self.places:
            found = owned.get(key)  # None if it was removed, as a bias may be
            if found is not None and found is not parameter and not isinstance(found, Bare):
                refuse_replaced(self, key)
            if found is not None and parameter.requires_grad:
                before.append((owned, key, found))
                owned[key] = proxy = Bare.of(parameter, self)  # type: ignore[assignment]
                proxy._is_param = True  # to isinstance, an nn.Parameter
        return before

    def _take_off(self, before: _Places) -> None:
        for owned, key, value in before:
            owned[key] = value
        for key, value in vars(self.module).items():
            if type(value) is Bare:  # put there by a hook, from the parameters: weight_norm, prune
                vars(self.module)[key] = value.plain.detach()

    # -- hooks that make weights of the parameters before forward ----------------------------------------------------

    def early_hooks(self) -> list[RemovableHandle]:
        """Put proxies in place before the module's own hooks run, where it has some that may derive weights."""
        if not self.module._forward_pre_hooks or self.module is self.engine.model:  # the root's run before it is called
            return []
        self._handles = [
            self.module.register_forward_pre_hook(InertHook(self._begin_early), prepend=True),
            self.module.register_forward_hook(InertHook(self._end_early), always_call=True),
        ]
        return self._handles

    def remove_early_hooks(self) -> None:
        """Remove the hooks, and proxies of a call that ended before forward was reached."""
        for handle in self._handles:
            handle.remove()
        self._end_early()

    def _begin_early(self) -> None:
        self._end_early()  # of a call that was left before forward
        if torch.is_grad_enabled() and instance_method(self.module) is self:  # not taken off for the moment
            self._early = self._put_proxies()

    def _end_early(self) -> None:
        if self._early is not None:  # forward was not reached
            self._take_off(self._early)
            self._early = None

    def cannot_follow(self, reason: str, consumer: nn.Module | None = None) -> BaseException:
        """Return the error that makes the engine tap the module again, or the layer that got a tensor of parameters."""
        if self.engine.forwards.can_begin_again:
            return NotFollowed([consumer or self.module], reason)
        return UserError(
            f"{self.name} ({type(self.module).__name__}) uses a parameter of its own in a way that cannot be followed "
            f"here ({reason}): give the parameter to a small submodule that takes and returns a tensor"
        )

    def reconsider(self) -> bool:
        """Treat operators whose operands do not depend on samples as constants: a result had as many rows by chance."""
        found = [key for key, role in self.roles.items() if isinstance(role, BareUse) and role.by_chance()]
        self.constants.update(found)
        for key in found:
            del self.roles[key]
        found_before, self._found_constant = self._found_constant, False
        return bool(found) or found_before

    # -- operators ---------------------------------------------------------------------------------------------------

    def derive(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        """Call an operator whose result depends on parameters and constants alone."""
        name = getattr(func, "__name__", "")
        if name in ("repeat", "tile") and self._repeats_for_samples(leaves):
            return leaves[0][None].samples().flatten(0, 1)
        if name in ("repeat", "tile"):
            func = _repeated
        elif name in _KEEP_ROWS:
            func = partial(_of_one_row, func)
        with without_hooks():
            result = _call(func, leaves, spec)
        if _is_plain(result):
            if name in STEPS_BACK:
                result.made_of = step_back(name, operands_of(leaves), result)
            return self.proxy_of(result)
        if isinstance(result, tuple | list | dict):
            return pytree.tree_map(lambda leaf: self.proxy_of(leaf) if isinstance(leaf, Tensor) else leaf, result)
        return result

    def _repeats_for_samples(self, leaves: list[Any]) -> bool:
        """Return whether rows of parameters are repeated as often as there are samples: p.repeat(B, 1, …).

        DeBERTa does so with the heads of its positions. Verification tells it from a number that is the same by chance,
        and what it was then it has to stay.
        """
        rows, *times = leaves
        alike = type(rows) is Bare and len(times) == rows.dim() and rows.shape[0] > 1
        if not alike or any(each != 1 for each in times[1:]):
            return False
        batch = self.batch()
        is_so = times[0] == batch
        if batch > 1:
            was_so = self.repeats.setdefault((rows.origin, tuple(rows.shape)), is_so)
            if was_so and not is_so:
                raise self.cannot_follow("rows of a parameter are repeated as often as there were samples before")
            return was_so
        return is_so and self.repeats.get((rows.origin, tuple(rows.shape)), False)

    def proxy_of(self, tensor: Tensor) -> Tensor:
        """Return a proxy for a tensor that is made of parameters; a constant is returned as it is."""
        return Bare.of(tensor, self) if tensor.requires_grad else tensor

    def use(self, func: Any, leaves: list[Any], spec: Any) -> Any:
        """Call an operator whose result depends on other tensors too."""
        role = self._role(func, leaves, spec, self.batch())
        if isinstance(role, Unrelated):
            return _call(func, leaves, spec)
        if isinstance(role, Constant):
            return self._constant(role, func, leaves, spec)
        if isinstance(role, Expanded):
            each = max(1, rows_of_a_sample(leaves, self.batch()))
            given = [_rows_for(leaf, role, each) if type(leaf) is Bare else leaf for leaf in leaves]
            args, kwargs = rebuild(given, spec)
            return func(*args, **kwargs)
        return self.apply(role, func, leaves, spec)

    def batch(self) -> int:
        size = self.engine.forwards.size()
        if size is None:
            raise UserError(
                f"a parameter of {self.name} is used outside of the model's forward: the number of samples is not known"
            )
        return size

    def _role(self, func: Any, leaves: list[Any], spec: Any, batch: int) -> BareUse | Constant | Expanded | Unrelated:
        key = func, key_of(spec), tuple(self._signature(leaf) for leaf in leaves)
        role = self.roles.get(key)
        if role is None and key in self.constants:
            role = self.roles[key] = Constant(self, name_of(func))
        if role is None:
            found = self._learn(func, leaves, spec, batch)
            if isinstance(found, str):
                raise self.cannot_follow(found)
            if batch < 2:
                return found  # one sample alone shows nothing of how several are treated
            role = self.roles[key] = found
        elif isinstance(role, BareUse) and not role.fits(leaves, batch):
            again = self._learn(func, leaves, spec, batch)
            if isinstance(again, Constant):  # it had as many rows, or a multiple of it, by chance
                self._found_constant = True
                self.constants.add(key)
                del self.roles[key]
            if not isinstance(again, BareUse):
                raise self.cannot_follow(f"{role.called} is given other sizes than before")
            again.known = role.known_for.setdefault(again.each, set())
            again.known_for = role.known_for
            return again
        return role

    def _learn(
        self, func: Any, leaves: list[Any], spec: Any, batch: int
    ) -> BareUse | Constant | Expanded | Unrelated | str:
        with without_hooks():  # a checkpoint that runs again learns nothing, and saves nothing of it
            return learn(self, func, operands_of(leaves), spec, batch)

    def _signature(self, leaf: Any) -> Any:
        if type(leaf) is Bare:
            return leaf.origin, leaf.plain.dim(), leaf.plain.numel() > 0
        if isinstance(leaf, Tensor):  # an empty one goes with any layout of rows, and shows nothing of others
            return "tensor", leaf.dim(), leaf.is_floating_point(), leaf.dtype == torch.bool, leaf.numel() > 0
        if isinstance(leaf, float):
            return float
        return leaf if isinstance(leaf, int | str | None) else repr(leaf)

    def _constant(self, role: Constant, func: Any, leaves: list[Any], spec: Any) -> Any:
        """Call an operator whose other operands are taken to be constants, with nothing of the samples."""
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and type(leaf) is not Bare]
        used = [*leaves_behind(others), *(other for other in others if other.is_leaf)]
        behind = [leaf for leaf in used if leaf.requires_grad]
        strays = [leaf for leaf in behind if isinstance(leaf, nn.Parameter)]
        if strays and len(strays) == len(behind):
            raise NotFollowed((), "a parameter is used outside of the module that owns it", strays=strays)
        if any(other.requires_grad for other in others):
            raise self.cannot_follow("a parameter meets the answer of a layer, and no samples")
        self.engine.forwards.admit_call(role, 0, shared=False)
        return self.derive(func, leaves, spec)

    def apply(self, role: BareUse, func: Any, leaves: list[Any], spec: Any) -> Any:
        if current_hooks() != (self.hooks or self.engine.forwards.hooks):
            raise self.cannot_follow("a parameter is used in a checkpoint inside its module")
        args, kwargs = rebuild([leaf.plain.detach() if type(leaf) is Bare else leaf for leaf in leaves], spec)
        if self.engine.forwards.in_trial:
            role.look(self.engine.forwards.samples_tried, [leaf for leaf in leaves if type(leaf) is not Bare])
        result = func(*args, **kwargs)
        if _is_plain(result):
            return self._hooked(role, (role, leaves, spec), [result])[0]
        found, shape = pytree.tree_flatten(result)
        real = [index for index, leaf in enumerate(found) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        answers = self._hooked(role, (role, leaves, spec), [found[index] for index in real])
        for index, answer in zip(real, answers, strict=True):
            found[index] = answer
        return pytree.tree_unflatten(found, shape)

    def _hooked(self, role: BareUse, call: Any, ys: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the results with the use behind them in autograd's graph."""
        for y in ys:
            dim = y.dim() + (role.each > 1)
            if dim not in role.known:
                self.engine.forwards.admit_call(role, dim, shared=False)
        answers = apply_used(call, self.engine.anchor.tensor, *ys)
        return answers if isinstance(answers, tuple) else (answers,)


def _rows_for(proxy: Bare, role: Expanded, each: int) -> Tensor:
    """Return a row of the parameter for each row of the other operands, `each` for a sample."""
    missing: Any = (None,) * max(0, role.dim - proxy.dim())
    with_row = proxy[missing] if missing else proxy
    rows: Tensor = with_row.samples()  # type: ignore[attr-defined]
    return rows if each == 1 else rows.repeat_interleave(each, 0)


_KEEP_ROWS = frozenset(("contiguous", "clone", "to", "float", "double", "half", "bfloat16", "type", "type_as"))


def _of_one_row(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call `func` on one row of x if all rows are the same, so that they are still known to be equal."""
    if x.dim() and x.shape[0] > 1 and x.stride(0) == 0:
        kwargs.pop("memory_format", None)
        changed: Tensor = func(x[:1], *args, **kwargs)
        return changed.expand(x.shape)
    unchanged: Tensor = func(x, *args, **kwargs)
    return unchanged


def expand_rows(row: Tensor, batch: int) -> Tensor:
    return row.expand(batch, *row.shape[1:])


def _repeated(x: Tensor, *sizes: Any) -> Tensor:
    """Return x.repeat(B, 1, ...) without copies, so that its rows are known to be equal."""
    flat = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    lead = len(flat) - x.dim()
    shape = [1] * lead + list(x.shape)
    if lead >= 0 and flat and shape[0] == 1 and all(size == 1 for size in flat[1:]):
        return x.reshape(shape).expand(flat[0], *shape[1:])
    return x.repeat(*flat)


def own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the parameters a module uses itself: its own, and those in ParameterLists and ParameterDicts."""
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield module, key, parameter
    for child in module.children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield from own_parameters(child)
