"""The largest tensors at the peak: how large, of what shape, what for, and the line of code that made them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dpscope.reports.memory.data import label_of, tensors_of
from dpscope.reports.memory.text import by_size
from dpscope.reports.tables import Row
from dpscope.reports.words import shorten
from dpscope.results.payloads.memory import TensorAtPeak
from dpscope.units import MISSING, format_bytes

SHOWN_TENSORS = 4  # tensors of each method in the text; the page and the result file have more
TENSOR_NOTE = (
    "line: the innermost line of Python outside torch that asked for it; backward: autograd made it for that line. "
    "The page and the result files name folders and functions too."
)
COLUMN_WIDTHS = {"method": 12, "made by": 20, "line": 40}  # characters


def shape_in_words(tensor: TensorAtPeak) -> str:
    return f"{'×'.join(map(str, tensor['shape'])) or 'scalar'} {tensor['dtype']}"


def maker_of(tensor: TensorAtPeak) -> str:
    """Module and operator; a tensor that was there before the step has only the module it belongs to."""
    return " · ".join(filter(None, (tensor["module"], tensor["operator"].removeprefix("aten::")))) or MISSING


def place_of(tensor: TensorAtPeak) -> str:
    """The line of code; whose backward it is, where autograd made it."""
    if not tensor["operator"]:
        return "before the step"
    if not tensor["line"]:
        return "autograd" if tensor["by_autograd"] else MISSING
    return f"backward of {tensor['line']}" if tensor["by_autograd"] else tensor["line"]


def short_place_of(tensor: TensorAtPeak) -> str:
    """The file without its folder, and the line: `model.py:12`, `model.py:12, backward`."""
    if not tensor["operator"] or not tensor["line"]:
        return place_of(tensor)
    place = tensor["line"].partition(" ")[0].rpartition("/")[2]
    return f"{place}, backward" if tensor["by_autograd"] else place


def tensor_section(rows: Sequence[Row], width: int) -> list[RenderableType]:
    """For each size: the largest tensors at each method's peak."""
    parts = by_size(rows, "Largest tensors at the peak", _table)
    return [*parts, "", Text(TENSOR_NOTE, style="dim")] if parts else []


def _table(rows: Sequence[Row]) -> list[RenderableType]:
    known = [(row, tensors["largest"][:SHOWN_TENSORS]) for row in rows if (tensors := tensors_of(row))]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in ("shape", "for", "made by", "line"):
        table.add_column(heading, overflow="fold")
    for row, largest in known:
        for place, tensor in enumerate(largest):
            cells = (
                "" if place else shorten(row.method, COLUMN_WIDTHS["method"]),
                format_bytes(tensor["bytes"]),
                f"× {tensor['count']}" if tensor["count"] > 1 else "",
                shape_in_words(tensor),
                label_of(tensor["component"]),
                shorten(maker_of(tensor), COLUMN_WIDTHS["made by"]),
                shorten(short_place_of(tensor), COLUMN_WIDTHS["line"]),
            )
            table.add_row(*map(Text, cells), end_section=place + 1 == len(largest))
    return [table] if known else []
