"""State that a module keeps between calls besides its parameters: buffers, and attributes of it and its children.

A unit without a layer family runs once for each sample, and each run has to find the state as it was. Changes of state
are taken off again and compared between samples. If all are equal (the singular vectors of a spectral norm, a counter,
a cache of positions) the state depends on no sample and is written to the module once. If not, it is refused: a running
mean would be released without noise, and an auxiliary loss read from the module would be that of one sample.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dpscope.errors import UserError
from dpscope.flash.torch_side.attributes import temporarily

_INTERNAL = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl", "_is_full_backward_hook"}
_IMMUTABLE = frozenset({bool, int, float, str, type(None)})
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MOST_CHANGES = 4  # of an option, by the user: then it is not watched any longer
_DEPTH = 4  # levels of nested containers that are searched


@contextmanager
def uncached_parametrizations() -> Iterator[None]:
    """Switch parametrize.cached() off inside the block: a weight made for one sample would be handed to others."""
    with temporarily(parametrize, _cache_enabled=0, _cache={}):
        yield


class ModuleState:
    """The attributes of a module and its children as they are now, and what a run has changed of them."""

    def __init__(self, unit: nn.Module) -> None:
        self.unit = unit
        self._undo: list[Callable[[], None]] = []
        seen: set[int] = set()
        self._tokens: dict[str, tuple[Any, Any]] = {}  # path -> value and token
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []  # attributes of modules, and as they are now
        for name, module in unit.named_modules():
            held = attributes_of(module)
            self._held.append((vars(module), held))
            for key, value in held.items():
                path = f"{name}.{key}" if name else key
                if type(value) in _IMMUTABLE:  # most are: no container to look into
                    self._tokens[path] = (value, value)
                    continue
                self._tokens[path] = (value, token(value))
                self._undo += _undo_of(value, seen)

    def take_changes(self) -> dict[str, Any]:
        """Return attributes that are new or changed, by path, and restore the modules.

        A container that holds tensors is returned as a list of them. Lists of the parameters themselves (nn.LSTM's
        flat weights) say nothing about samples and are left out.
        """
        own: set[int] | None = None
        changed: dict[str, Any] = {}
        for name, module in self.unit.named_modules():
            attributes = vars(module)
            for key in [key for key in attributes if key not in _INTERNAL]:
                path = f"{name}.{key}" if name else key
                known = self._tokens.get(path)
                value = attributes[key]
                if known is None:
                    del attributes[key]
                elif value is known[0] and (type(value) in _IMMUTABLE or token(value) == known[1]):
                    continue
                if own is None:
                    own = {id(tensor) for tensor in (*self.unit.parameters(), *self.unit.buffers())}
                tensors = list(tensors_inside(value))
                if not tensors or any(id(tensor) not in own for tensor in tensors):
                    changed[path] = value if isinstance(value, Tensor) else tensors or copy.copy(value)
        self.restore()
        return changed

    def restore(self) -> None:
        """Give every attribute the value that it had, and remove new ones."""
        for undo in self._undo:
            undo()
        for attributes, before in self._held:
            for key in attributes.keys() - before.keys() - _INTERNAL:
                del attributes[key]
            attributes.update(before)


class OptionWatch:
    """The parts of a model that decide what its forward does with samples.

    They are the numbers, flags and strings that modules hold, in dictionaries and objects (a configuration) of theirs,
    too; their children, forwards of their own, and how many hooks, children and parameters they have. Changes by
    forward itself (a counter) do not count, and what the user changes again and again is no longer watched.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        owned = [vars(module) for module in self.modules]
        inner = [
            value if isinstance(value, dict) else vars(value)
            for own in owned
            for value in own.values()
            if type(value) is dict or _is_object(value)
        ]
        holders = {id(holder): holder for holder in (*owned, *inner)}
        self._cells = [
            (holder, key)
            for holder in holders.values()
            for key, value in holder.items()
            if key not in _INTERNAL and _is_option(value)
        ]
        self._cells += [(own, "forward") for own in owned]
        children = [own["_modules"] for own in owned if type(own["_modules"]) is dict]  # not of a scripted module
        self._cells += [(held, name) for held in children for name in held]
        self._counted = [
            own[name] for own in owned for name in (*_HOOKS, "_modules") if isinstance(own.get(name), dict)
        ]
        self._changes: Counter[int] = Counter()
        self._group()
        self.note()

    def _group(self) -> None:
        """Put cells of one holder side by side: thousands are read around each forward pass."""
        groups: dict[int, tuple[dict[str, Any], list[str]]] = {}
        for holder, key in self._cells:
            groups.setdefault(id(holder), (holder, []))[1].append(key)
        self._cells = [(holder, key) for holder, keys in groups.values() for key in keys]
        self._reads = [holder.get for holder, _ in groups.values()], [keys for _, keys in groups.values()]

    def values(self) -> list[Any]:
        """Return all of them as they are."""
        return [*chain.from_iterable(map(map, *self._reads)), *map(len, self._counted)]

    def changed_since(self, before: list[Any]) -> str | None:
        """Return the name of an option that is not as it was when `values` gave `before`; None if all are."""
        changed = next(
            (index for index, both in enumerate(zip(self.values(), before, strict=True)) if _differ(*both)), None
        )
        if changed is None:
            return None
        return self._cells[changed][1] if changed < len(self._cells) else "hooks"

    def note(self) -> None:
        """Remember the current state as known."""
        self._values = self.values()

    def has_changed(self) -> bool:
        """Return whether anything has changed since it was noted."""
        values = self.values()
        if all(map(operator.is_, values, self._values)):
            return False
        changed = [index for index, both in enumerate(zip(values, self._values, strict=True)) if _differ(*both)]
        self._changes.update(changed)
        tired = {index for index in changed if self._changes[index] >= _MOST_CHANGES}
        if tired:
            cells = len(self._cells)
            self._cells = [cell for index, cell in enumerate(self._cells) if index not in tired]
            self._counted = [each for index, each in enumerate(self._counted, cells) if index not in tired]
            self._changes.clear()
            self._group()
        self.note()
        return bool(changed)


def _differ(new: Any, old: Any) -> bool:
    return new is not old and not ((_is_option(new) or callable(new)) and new == old)


def _is_option(value: Any) -> bool:
    return type(value) in _IMMUTABLE or (type(value) is tuple and all(type(part) in _IMMUTABLE for part in value))


def _is_object(value: Any) -> bool:
    """Return True for an instance of an ordinary class, whose attributes may be state."""
    if isinstance(value, (nn.Module, Tensor, type, torch.Generator)) or callable(value):
        return False
    return hasattr(value, "__dict__")


def _parts(value: Any) -> Sequence[Any] | None:
    """Return the contents of a container or an ordinary object; None for everything else."""
    if isinstance(value, (list, tuple, deque, set)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    return list(vars(value).values()) if _is_object(value) else None


def token(value: Any, depth: int = _DEPTH, *, identity: bool = True) -> Any:
    """Return a token that stays equal while nothing in a value changes; without `identity`, for equal contents."""
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, weakref.ref):
        return weakref.ref  # it holds nothing
    parts = _parts(value) if depth else None
    if parts is None:
        return id(value)
    return id(value) if identity else type(value), *(token(part, depth - 1, identity=identity) for part in parts)


def _undo_of(value: Any, seen: set[int], depth: int = _DEPTH) -> Iterator[Callable[[], None]]:
    """Yield functions that restore what containers hold now."""
    parts = _parts(value) if depth else None
    if parts is None or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, (list, deque)):
        yield partial(_refill, value, value.extend, parts)
    elif isinstance(value, (set, dict)):
        yield partial(_refill, value, value.update, value.copy())
    elif _is_object(value):
        attributes = vars(value)
        yield partial(_refill, attributes, attributes.update, attributes.copy())
    for part in parts:
        yield from _undo_of(part, seen, depth - 1)


def _refill(container: Any, fill: Callable[[Any], None], content: Any) -> None:
    container.clear()
    fill(content)


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are not torch's own."""
    return {key: value for key, value in vars(module).items() if key not in _INTERNAL}


def tensors_inside(value: Any, seen: set[int] | None = None, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in a value; not those of containers that are `seen` already."""
    if type(value) in _IMMUTABLE:
        return
    if isinstance(value, Tensor):
        yield value
        return
    parts = _parts(value) if depth and (seen is None or id(value) not in seen) else None
    if seen is not None and parts is not None:
        seen.add(id(value))
    for part in parts or ():
        yield from tensors_inside(part, seen, depth - 1)


class BufferWatch:
    """Buffers of a model outside of units that run sample by sample: none may be made of the samples.

    Those that are not saved (persistent=False) may be replaced, as caches are, but not written to.
    """

    def __init__(self, model: nn.Module, units: Iterable[nn.Module]) -> None:
        inside = {id(module) for unit in units for module in unit.modules()}
        self.independent: set[str] = set()  # paths of buffers that change, whatever the samples are in the same way
        self._places = [
            (f"{name}.{key}" if name else key, module, key)
            for name, module in model.named_modules()
            if id(module) not in inside
            for key, buffer in module._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]

    def watches(self, path: str) -> bool:
        return any(path == each for each, _, _ in self._places)

    def look(self) -> list[tuple[Tensor | None, int]]:
        buffers = [module._buffers.get(key) for _, module, key in self._places]
        return [(buffer, -1 if buffer is None else buffer._version) for buffer in buffers]

    def changed(self, before: list[tuple[Tensor | None, int]]) -> list[str]:
        """Return paths of buffers that changed since `before` was taken, and may depend on the samples."""
        replaced = self.replaced(before)
        return [
            path
            for (path, _, _), (buffer, version) in zip(self._places, before, strict=True)
            if path not in self.independent
            and (path in replaced or (buffer is not None and buffer._version != version))
        ]

    def replaced(self, before: list[tuple[Tensor | None, int]]) -> list[str]:
        """Return paths of saved buffers that are other tensors than when `before` was taken."""
        return [
            path
            for (path, module, key), (buffer, _) in zip(self._places, before, strict=True)
            if module._buffers.get(key) is not buffer and key not in module._non_persistent_buffers_set
        ]

    def values(self, paths: list[str]) -> list[Tensor | None]:
        buffers = {path: module._buffers.get(key) for path, module, key in self._places if path in paths}
        return [None if buffer is None else buffer.detach().clone() for buffer in map(buffers.get, paths)]

    def judge(self, path: str, values: list[Tensor | None]) -> None:
        """Raise UserError if forward makes different `values` of a buffer or parameter from different samples."""
        first = values[0]
        if len(values) > 1 and all(v is not None and first is not None and _equal(first, v) for v in values):
            self.independent.add(path)
            return
        kind = "buffer" if self.watches(path) else "parameter"
        raise UserError(
            f"{path} is a {kind} that forward computes from the samples: it would leave training without noise; put "
            "its module into eval() mode, or leave it out"
        )


class Remains:
    """State that the runs of all samples have left on the unit."""

    def __init__(self, unit: nn.Module, name: str) -> None:
        self.unit, self.name = unit, name
        self.buffers = {key for key, _ in unit.named_buffers()}

    def agreed(self, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return path -> value, equal for all samples. Raise UserError if samples differ, or autograd would be cut."""
        paths = {path for run in runs for path in run}
        return {path: self._agreed(path, [run.get(path) for run in runs]) for path in sorted(paths)}

    def _agreed(self, path: str, values: list[Any]) -> Any:
        first = values[0]
        if isinstance(first, Tensor):
            same = all(isinstance(value, Tensor) and _equal(first, value) for value in values[1:])
            agree = same and not first.requires_grad
        else:
            contents = [token(value, identity=False) for value in values]
            agree = contents.count(contents[0]) == len(contents) and not any(map(list, map(tensors_inside, values)))
        if not agree:
            self.refuse(path)
        return first

    def agreed_rows(self, path: str, rows: Tensor) -> Tensor:
        """Return the same for values (B, ...), one a sample."""
        first = rows[0]
        if rows.requires_grad or not _equal(first.expand_as(rows), rows):
            self.refuse(path)
        return first.clone()

    def refuse(self, path: str) -> NoReturn:
        kind = f"{self.name} ({type(self.unit).__name__})"
        if path in self.buffers:
            raise UserError(
                f"{kind} computes its buffer {path} from the samples of the batch in forward: it would leave training "
                "without noise; put the module into eval() mode, or leave the buffer out"
            )
        raise UserError(
            f"{kind} keeps {path} on the module in forward, and its samples run one by one here, so only one sample's "
            "value would stay: return it from forward instead, one value for each sample"
        )

    @torch.no_grad()
    def commit(self, agreed: dict[str, Any]) -> None:
        """Write what all samples have left to the unit, once."""
        for path, value in agreed.items():
            owner, _, key = path.rpartition(".")
            module = self.unit.get_submodule(owner)
            buffer = module._buffers.get(key)
            known = vars(module).get(key)
            if key not in module._buffers:
                if type(known) is type(value) and _is_object(value):
                    vars(known).update(vars(value))
                else:
                    vars(module)[key] = value
            elif buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
                buffer.copy_(value)
            else:
                module._buffers[key] = value


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
