"""A tensor that was live at the peak: its shape, what made it, and which line of code asked for it."""

from __future__ import annotations

from dpscope.results.payloads.memory import TensorAtPeak
from dpscope.units import MISSING


def shape_in_words(tensor: TensorAtPeak) -> str:
    """Return `8×1024 float32`."""
    return f"{'×'.join(map(str, tensor['shape'])) or 'scalar'} {tensor['dtype']}"


def maker_of(tensor: TensorAtPeak) -> str:
    """Return module and operator; a tensor from before the step has only its module."""
    return " · ".join(filter(None, (tensor["module"], tensor["operator"].removeprefix("aten::")))) or MISSING


def place_of(tensor: TensorAtPeak, *, short: bool = False) -> str:
    """Return the line of code, and `backward` if autograd made the tensor; `short`: `model.py:12, backward`."""
    line, by_autograd = tensor["line"], tensor["by_autograd"]
    if not tensor["operator"]:
        return "before the step"
    if not line:
        return "autograd" if by_autograd else MISSING
    if short:
        return line.partition(" ")[0].rpartition("/")[2] + (", backward" if by_autograd else "")
    return f"backward of {line}" if by_autograd else line
