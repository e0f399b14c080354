"""Everything that a CUDA graph has fixed and that may change between its replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpscope.flash.engine import FlashEngine
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer

CONTENTS = (
    *("_modules", "_parameters", "_buffers"),
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
)
"""Dictionaries of a module whose contents a forward and a backward pass depend on."""
GLOBAL_HOOKS = [getattr(nn.modules.module, f"_global{name}") for name in CONTENTS if name.endswith("hooks")]


def device_of(engine: FlashEngine) -> torch.device:
    return next(iter(engine.parameters)).device


class Settings(NamedTuple):
    """Everything that a graph has fixed and that may change: objects, and what is made anew whenever it is read."""

    objects: list[Any]
    values: list[Any]

    @classmethod
    def of(cls, optimizer: DPFlashOptimizer, loss: Callable[..., Tensor]) -> Settings:
        engine = optimizer.engine
        kind = device_of(engine).type
        held = [vars(module) for module in engine.modules]
        inside = [own[name] for own in held for name in CONTENTS]
        objects = [
            *chain.from_iterable(map(dict.values, chain(held, inside, GLOBAL_HOOKS))),
            *(parameter.requires_grad for parameter in engine.parameters),
            *engine.rehearsals.options.values(),  # of objects that modules hold, too
            *held_by(loss, {id(module) for module in engine.modules}),
            *(value for name, value in vars(engine.clip).items() if name != "bounds"),  # which replays are given
            engine.clip,
            engine.loss_reduction,
            engine.loss_scale,
            engine.taps,
            optimizer.noise_multiplier == 0,
            torch.is_autocast_enabled(kind),
            torch.get_autocast_dtype(kind),
            torch.backends.cudnn.allow_tf32,
            torch.are_deterministic_algorithms_enabled(),
        ]
        buffers = (buffer for own in held for buffer in own["_buffers"].values() if buffer is not None)
        addresses = map(Tensor.data_ptr, chain(engine.parameters, buffers))
        return cls(objects, [len(engine.taps), torch.get_float32_matmul_precision(), *addresses])

    def is_same(self, other: Settings) -> bool:
        if self.values != other.values or len(self.objects) != len(other.objects):
            return False
        return all(map(is_, self.objects, other.objects)) or all(map(_is_same, self.objects, other.objects))


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in (int, float, bool, str, MethodType) and a == b)


def held_by(value: Any, known: set[int], names: Sequence[str] = ()) -> Iterator[Any]:
    """Yield what a loss function reads besides its arguments: closure variables, globals, defaults, attributes.

    Functions, modules and objects among these are searched too, unless they are `known`. Of objects, only the
    attributes in `names` are searched. Contents of lists, dictionaries and library functions are not searched.
    """
    if id(value) in known:
        return
    known.add(id(value))
    parts: list[Any] = []
    if isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        names = _names_in(value.__func__)
        parts = [value.__self__, value.__func__]
    elif isinstance(value, nn.Module):
        own = vars(value)
        parts = [*own.values(), *(part for name in CONTENTS for part in own[name].values())]
    elif _is_own(value) and isinstance(value, FunctionType):
        names = _names_in(value)
        around = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        parts = [*around, *(value.__globals__.get(name) for name in names), *defaults]
    elif _is_own(value) and not isinstance(value, (type, ModuleType, Tensor)) and hasattr(value, "__dict__"):
        parts = [vars(value)[name] for name in names if name in vars(value)]
    yield from parts
    for part in parts:
        yield from held_by(part, known, names)


def _names_in(function: Any) -> Sequence[str]:
    code = getattr(function, "__code__", None)
    return () if code is None else code.co_names


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_own(value: Any) -> bool:
    """Return whether a function or an object is the user's, not a library's."""
    where = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    return not (where or "").startswith(("torch", "builtins", "dpscope", "transformers", "numpy"))
