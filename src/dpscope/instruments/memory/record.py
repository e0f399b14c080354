"""The tracker's record: every storage from birth to death, and who asked for it.

Python is not on the stack while autograd's engine runs a node, but the node has a number. The line that made the node
was noted in the forward pass, and hooks around every module's forward note the number at which it begins and ends.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from dpscope.flash.torch_side.autograd_graph import in_backward
from dpscope.instruments.module_hooks import module_hooks
from dpscope.places import shorten_path

_PASS_ON = ("torch", "dpscope.instruments", "dpscope.forecast")  # packages whose frames only pass a request on
_FLASH = ("dpscope.flash",)
# Its modules that stand in for a layer's forward: what they make there was asked for by the line that calls the layer.
_STAND_IN = tuple(
    f"{_FLASH[0]}.{name}"
    for name in (
        "taps.taps",
        "taps.recorder",
        "compiled.traced",
        "layers",
        "torch_side.autocast",
        "torch_side.autograd_graph",
    )
)
_ENGINE = ("torch.autograd.graph", "_engine_run_backward")  # the frame below which autograd's engine calls Python


class CodeLine(NamedTuple):
    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{shorten_path(self.file)}:{self.number} {self.function}"


class Asker(NamedTuple):
    """Origin of a tensor. `line` is None if autograd's engine made it without a known line."""

    code: str  # the innermost function outside torch; comprehensions and lambdas count as the function around them
    line: CodeLine | None
    function: CodeType | None = None  # the same


def find_asker(frame: FrameType | None) -> Asker:
    code, function, line, is_settled = "", None, None, False
    while frame is not None and not (is_settled and function):
        module: str = frame.f_globals.get("__name__", "")
        name = frame.f_code.co_name
        if not _is_in(module, _PASS_ON):
            stands_in = _is_in(module, _STAND_IN)
            if not is_settled and (line is None or not (stands_in or _is_in(module, _FLASH))):
                line = CodeLine(frame.f_code.co_filename, frame.f_lineno, name)
            is_settled = is_settled or not stands_in
            if function is None and not name.startswith("<"):
                code, function = f"{module}:{name}", frame.f_code
        elif (module, name) == _ENGINE:
            is_settled = True
        frame = frame.f_back
    return Asker(code, line, function)


@cache
def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


class ForwardLines:
    """Autograd's nodes by number, with the line that made each."""

    def __init__(self) -> None:
        self._lines: dict[int, CodeLine] = {}
        self._next = _next_number()  # when it was last looked at

    def note(self) -> None:
        """Record the line of a node that was just made. Call it in every operator of a forward pass."""
        number = _next_number()
        if number > self._next:
            line = find_asker(sys._getframe(1)).line
            if line is not None:
                self._lines.update(dict.fromkeys(range(self._next, number), line))
            self._next = number

    def current(self) -> CodeLine | None:
        """Return the line whose node the engine runs now; None for nodes that no line made, such as sums."""
        node = torch._C._current_autograd_node()
        return None if node is None else self._lines.get(node._sequence_nr())


def _next_number() -> int:
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


class ModulePaths:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._running: list[str] = []  # the forwards that are running, outermost first
        self._numbers: list[int] = []  # autograd's number, and
        self._modules: list[str] = []  # the module whose forward runs from there on

    def watching(self) -> AbstractContextManager[None]:
        # Always: checkpointing leaves forwards by an exception on purpose.
        return module_hooks(self._model, before=self._enter, after=self._leave, always=True)

    def current(self) -> str:
        """Return the module that the calling thread's operator works for; empty if none."""
        if self._running:
            return self._running[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        place = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._modules[place] if place >= 0 else ""

    def _enter(self, path: str) -> None:
        self._running.append(path)
        self._note()

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()
        self._note()

    def _note(self) -> None:
        if not in_backward():  # a forward that runs again does not make the nodes that will run
            self._numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
            self._modules.append(self._running[-1] if self._running else "")


BEFORE_STEP = ""  # the operator of a storage that was there before the step
OUTSIDE_PHASES = "step"  # the phase of what happens outside every phase

BORN, DIED, RESIZED, RELEASED = range(4)
StorageEvent = tuple[int, int, int]  # (kind, index of the life, bytes: of a birth or after a resize)


@dataclass(frozen=True, kw_only=True)
class Birth:
    """Birth of a storage: all that a component rule is given.

    operator    the operator that made it, as `aten::mm`; empty for what was there before the step
    phase       forward, backward, clip, noise, optimizer; `step` outside of them
    module      path of the module it was made for, as `blocks.3.up`: the one whose forward ran, or, in a backward pass,
                the one whose forward made the node that ran; empty if there is none
    code        the innermost Python function outside torch that asked for it, as `package.module:function`
    function    the same, as Python's code object
    line        the Python line that asked for it; of what autograd's engine makes, the line of the forward pass that it
                goes back through, None if there is none
    by_autograd autograd's engine made it, for that line
    shape       of the tensor it first appeared as
    dtype       likewise, as `float32`
    nbytes      its size at birth
    recomputed  made by a forward that ran again inside a backward pass (activation checkpointing)
    """

    operator: str
    phase: str
    module: str
    code: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    recomputed: bool = False
    function: CodeType | None = None
    line: CodeLine | None = None
    by_autograd: bool = False


@dataclass(slots=True, eq=False)
class Life:
    """One storage: its birth, its owner, who keeps it, and the saved tensors of autograd that hold it."""

    index: int
    birth: Birth
    first: TensorWeakRef  # the tensor it first appeared as
    nbytes: int = field(init=False)  # now
    module: str = field(init=False)
    owner: str | None = None  # the component of who holds it for good
    kept: bool = False  # the method was seen to hold it beyond what autograd does
    saves: int = 0  # saved tensors of autograd's graph that hold it now
    was_saved: bool = False

    def __post_init__(self) -> None:
        self.nbytes, self.module = self.birth.nbytes, self.birth.module


@dataclass
class Record:
    lives: list[Life] = field(default_factory=list)
    events: list[StorageEvent] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)  # (number of events before it, phase that begins)

    @property
    def start(self) -> int:
        """The event after which everything from before the step is counted."""
        return max(0, self.marks[0][0] - 1) if self.marks else 0

    def last_releases(self) -> list[int | None]:
        """Return for each life the last event at which autograd released it; None if there is none."""
        found: list[int | None] = [None] * len(self.lives)
        for event, (kind, index, _) in enumerate(self.events):
            if kind == RELEASED and not self.lives[index].saves:
                found[index] = event
        return found

    def totals(self) -> list[int]:
        """Return the live bytes after each event, counted without components, which have to add up to them."""
        sizes = [0] * len(self.lives)
        totals, total = [], 0
        for kind, index, nbytes in self.events:
            if kind != RELEASED:
                size = 0 if kind == DIED else nbytes
                total += size - sizes[index]
                sizes[index] = size
            totals.append(total)
        return totals
