"""How a method looks: one colour and one symbol wherever the page shows it."""

from __future__ import annotations

from collections.abc import Sequence

from dpscope.reports.palette import method_colours, method_markers
from dpscope.reports.tables import Row


def looks_of(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """Method -> its colour and symbol, for all methods that were compared with these rows' results."""
    methods = list(dict.fromkeys(method for row in rows for method in (*row.methods, row.method)))
    colours, markers = method_colours(methods), method_markers(methods)
    return {method: {"colour": colours[method], "marker": markers[method]} for method in methods}
