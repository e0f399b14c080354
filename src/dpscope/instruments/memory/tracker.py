"""Tracker of a step: it watches every operator and follows each storage from birth to death.

It counts storages, not tensors, keeps weak references, and allocates nothing on the device. `holdings` says who holds
what, and is asked whenever a phase begins or ends. Times are never measured here, because a tracked step takes a few
times as long.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef

from dpscope.flash.torch_side.autograd_graph import in_backward, saved_tensors_packed
from dpscope.instruments import gradient_sums
from dpscope.instruments.memory.record import (
    BEFORE_STEP,
    BORN,
    DIED,
    OUTSIDE_PHASES,
    RELEASED,
    RESIZED,
    Asker,
    Birth,
    ForwardLines,
    Life,
    ModulePaths,
    Record,
    find_asker,
)
from dpscope.instruments.timing import Step
from dpscope.vocabulary.components import ACTIVATION_HOOKS
from dpscope.vocabulary.phases import listening

Holding = tuple[str, str, Tensor]  # (component, path of the module it belongs to, tensor)


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that follows the storages of one device while `tracking()`. The record is complete afterwards."""

    def __init__(self, device: str, model: nn.Module, holdings: Callable[[], Iterable[Holding]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Record()
        self._device = device
        self._holdings = holdings
        self._paths = ModulePaths(model)
        self._lines = ForwardLines()
        self._indices: dict[int, int] = {}  # address of a live storage -> its life
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._phases: list[str] = []
        self._open = False

    @contextmanager
    def tracking(self) -> Iterator[Record]:
        gradient_sums.prepare()
        with ExitStack() as stack:
            stack.callback(self._close)
            self._open = True
            self.note_holdings()
            stack.enter_context(self._paths.watching())
            stack.enter_context(listening(self._phase))
            stack.enter_context(_resizes_reported(self._resized))
            stack.enter_context(saved_tensors_packed(self._pack, _Saved.unpack))
            stack.enter_context(self)
            self._mark()
            yield self.record
            self.note_holdings()

    @property
    def live_bytes(self) -> int:
        """Bytes of the storages that are live now."""
        return sum(self.record.lives[index].nbytes for index in list(self._indices.values()))

    def note_holdings(self) -> None:
        """Record the owners that `holdings` names now. Each owns its storage for the storage's whole life."""
        for component, module, tensor in self._holdings():
            for life in self._lives_of(tensor, BEFORE_STEP):
                if component == ACTIVATION_HOOKS:
                    life.kept, life.module = True, life.module or module
                elif life.owner is None:
                    life.owner, life.module = component, module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not in_backward():
            self._lines.note()
        func = gradient_sums.as_without_modes(func, args, sys._getframe().f_back)
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        for tensor in _tensors_in((args, kwargs, result)):
            self._lives_of(tensor, name)
        return result

    def _lives_of(self, tensor: Tensor, operator: str) -> list[Life]:
        """Return the lives of the storages behind a tensor; register new storages and record resizes."""
        lives = []
        for storage in _storages(tensor):
            if storage.device.type != self._device:
                continue
            index = self._indices.get(storage._cdata)
            if index is None:
                index = self._register(storage, tensor, operator)
            elif storage.nbytes() != self.record.lives[index].nbytes:
                self._resized(storage)
            lives.append(self.record.lives[index])
        return lives

    def _register(self, storage: torch.UntypedStorage, tensor: Tensor, operator: str) -> int:
        before = operator == BEFORE_STEP
        asker = Asker("", None) if before else find_asker(sys._getframe(1))
        by_autograd = not before and asker.line is None
        birth = Birth(
            operator=operator,
            phase=self._phases[-1] if self._phases else OUTSIDE_PHASES,
            module="" if before else self._paths.current(),
            code=asker.code,
            function=asker.function,
            line=self._lines.current() if by_autograd else asker.line,
            by_autograd=by_autograd,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            nbytes=storage.nbytes(),
            # A forward runs again inside a backward pass: gradients are enabled there.
            recomputed=not before
            and in_backward()
            and torch.is_grad_enabled()
            and torch._C._functorch.peek_interpreter_stack() is None,
        )
        index, address = len(self.record.lives), storage._cdata
        self.record.lives.append(Life(index, birth, TensorWeakRef(tensor)))
        self._indices[address] = index
        self._references[address] = weakref.ref(storage, partial(self._record_death, address))
        self.record.events.append((BORN, index, birth.nbytes))
        return index

    def _record_death(self, address: int, reference: object) -> None:
        if self._open:
            del self._references[address]
            self.record.events.append((DIED, self._indices.pop(address), 0))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        index = self._indices.get(storage._cdata)
        if index is not None:
            self.record.lives[index].nbytes = storage.nbytes()
            self.record.events.append((RESIZED, index, storage.nbytes()))

    def _pack(self, tensor: Tensor) -> _Saved:
        # The tensor without its history: an output saved with it would hold its own graph for ever.
        return _Saved(tensor.detach(), self._lives_of(tensor, BEFORE_STEP), self._released)

    def _released(self, life: Life) -> None:
        if self._open:
            self.record.events.append((RELEASED, life.index, 0))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.note_holdings()
        self._phases.append(name)
        self._mark()
        try:
            yield
        finally:
            self.note_holdings()
            self._phases.pop()
            self._mark()

    def _mark(self) -> None:
        self.record.marks.append((len(self.record.events), self._phases[-1] if self._phases else OUTSIDE_PHASES))

    def _close(self) -> None:
        self._open = False
        self._references.clear()
        self._indices.clear()


def _tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in an operator's arguments; pytree knows more containers, but takes longer."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        yield from _tensors_in([*value.values()])


class _Saved:
    """Proxy for a saved tensor in autograd's graph; deleted when the graph releases it."""

    __slots__ = ("_firsts", "_lives", "_released", "_tensor")

    def __init__(self, tensor: Tensor, lives: list[Life], released: Callable[[Life], None]) -> None:
        self._tensor = tensor
        self._lives = lives
        # The graph would hold the very tensor, and code that refers to it weakly (flash clipping shares casts so) would
        # find it. One with a history stays out: it may be the output of the node that saves it, and hold that.
        self._firsts = [first for life in lives if (first := life.first()) is not None and first.grad_fn is None]
        self._released = released
        for life in lives:
            life.saves += 1
            life.was_saved = True

    def unpack(self) -> Tensor:
        return self._tensor

    def __del__(self) -> None:
        for life in self._lives:
            life.saves -= 1
            if not life.saves:
                self._released(life)


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    if tensor.layout == torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    return []


@contextmanager
def _resizes_reported(report: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Report resizes of storages, which are no operators, by replacing `UntypedStorage.resize_`."""
    storage_class: Any = torch.UntypedStorage
    original, own = storage_class.resize_, "resize_" in vars(storage_class)

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        report(storage)
        return result

    storage_class.resize_ = resize_
    try:
        yield
    finally:
        if own:
            storage_class.resize_ = original
        else:
            del storage_class.resize_


def track(step: Step, *, device: str, model: nn.Module, holdings: Callable[[], Iterable[Holding]]) -> Record:
    """Record one step."""
    with Tracker(device, model, holdings).tracking() as record:
        step()
    return record
