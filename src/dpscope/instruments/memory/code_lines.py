"""The line of Python that asked for a tensor: of a forward pass, or of the forward that a backward pass goes through.

Python is not on the stack while autograd's engine runs a node, but the node has a number, and the line that made the
node was noted in the forward pass.
"""

from __future__ import annotations

import sys
from functools import cache
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from dpscope.paths import shorten_path

_PASS_ON = ("torch", "dpscope.instruments", "dpscope.forecast")  # packages whose frames only pass a request on
_FLASH = ("dpscope.flash",)
# Its modules that stand in for a layer's forward: what they make there was asked for by the line that calls the layer.
_STAND_IN = tuple(
    f"{_FLASH[0]}.{name}"
    for name in ("taps.taps", "taps.traced", "layers", "torch_side.autocast", "torch_side.saved_tensors")
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
