"""The largest tensors at the peak: how large, of what shape, what for, and the line of code that made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.reports.memory.data import label_of
from dpscope.reports.tables import Row, figure_of, group_by_size
from dpscope.reports.words import shorten, size_in_words
from dpscope.units import MISSING, format_bytes

SHOWN = 4  # tensors of each method in the text; the page and the result file have more
NOTE = (
    "line: the innermost line of Python outside torch that asked for it; backward: autograd made it for that line. "
    "The page and the result files name folders and functions too."
)
LONGEST = {"method": 12, "made by": 20, "line": 40}  # characters


@dataclass(frozen=True)
class TensorAtPeak:
    """One tensor, or `count` of them that are alike but for the number of their layer."""

    bytes: float  # of one
    count: int
    shape: tuple[int, ...]
    dtype: str
    component: str
    module: str
    phase: str
    operator: str  # empty for what was there before the step
    line: str  # `model.py:12 forward`, or nothing
    by_autograd: bool  # made in a backward pass, for that line of the forward pass

    @property
    def total(self) -> float:
        return self.bytes * self.count

    @property
    def shape_in_words(self) -> str:
        return f"{'×'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"

    @property
    def maker(self) -> str:
        """Module and operator; a tensor that was there before the step has only the module it belongs to."""
        parts = (self.module, self.operator.removeprefix("aten::"))
        return " · ".join(part for part in parts if part) or MISSING

    @property
    def where(self) -> str:
        """The line of code; whose backward it is, where autograd made it."""
        if not self.operator:
            return "before the step"
        if not self.line:
            return "autograd" if self.by_autograd else MISSING
        return f"backward of {self.line}" if self.by_autograd else self.line

    @property
    def where_in_short(self) -> str:
        """The file without its folder, and the line: `model.py:12`, `model.py:12, backward`."""
        if not self.operator or not self.line:
            return self.where
        place = self.line.partition(" ")[0].rpartition("/")[2]
        return f"{place}, backward" if self.by_autograd else place


def tensors_of(row: Row) -> tuple[list[TensorAtPeak], float]:
    """The largest first, and the bytes of all that are not listed; none where a file has none, or damaged ones."""
    result = row.measured.get("memory")
    told = result.memory.get("tensors") if result is not None and result.ok else None
    if not isinstance(told, dict) or not isinstance(told.get("largest"), list):
        return [], 0.0
    rest = told.get("rest")
    left = figure_of(rest.get("bytes")) if isinstance(rest, dict) else None
    return [tensor for entry in told["largest"] if (tensor := _tensor(entry))], left or 0.0


def _tensor(entry: Any) -> TensorAtPeak | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list):
        return None
    size, count = figure_of(entry.get("bytes")), figure_of(entry.get("count"))
    if size is None or count is None:
        return None
    names = ("dtype", "component", "module", "phase", "operator", "line")
    words: dict[str, Any] = {name: str(entry.get(name) or "") for name in names}
    by_autograd = bool(entry.get("by_autograd"))
    return TensorAtPeak(bytes=size, count=int(count), shape=tuple(entry["shape"]), by_autograd=by_autograd, **words)


def tensor_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """For each size: the largest tensors at each method's peak."""
    parts: list[RenderableType] = []
    for group in group_by_size(rows):
        known = [(row, *tensors_of(row)) for row in group if tensors_of(row)[0]]
        if known:
            heading = f"Largest tensors at the peak: {size_in_words(group[0].first.spec)}"
            parts += [*([""] if parts else []), Text(heading, style="bold"), "", _table(known)]
    if parts:
        parts += ["", Text(NOTE, style="dim")]
    return parts


def _table(known: Sequence[tuple[Row, list[TensorAtPeak], float]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, justify in (("method", "left"), ("size", "right"), ("", "left")):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for heading in ("shape", "for", "made by", "line"):
        table.add_column(heading, overflow="fold")
    for row, tensors, _ in known:
        for place, tensor in enumerate(tensors[:SHOWN]):
            cells = (
                "" if place else shorten(row.method, LONGEST["method"]),
                format_bytes(tensor.bytes),
                f"× {tensor.count}" if tensor.count > 1 else "",
                tensor.shape_in_words,
                label_of(tensor.component),
                shorten(tensor.maker, LONGEST["made by"]),
                shorten(tensor.where_in_short, LONGEST["line"]),
            )
            table.add_row(*map(Text, cells), end_section=place + 1 == len(tensors[:SHOWN]))
    return table
