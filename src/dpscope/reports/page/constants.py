"""What the page's scripts have to agree on with Python: handed over in the page's data, and defined nowhere else."""

from __future__ import annotations

from typing import Any

from dpscope.reports.doubt import MARK
from dpscope.reports.memory.text import TRIFLE
from dpscope.reports.palette import BLANK, INK, ON_DARK
from dpscope.reports.traffic.data import APPROXIMATELY
from dpscope.units import GIB, KIB, MIB, MISSING

CONSTANTS: dict[str, Any] = {
    "units": {"KIB": KIB, "MIB": MIB, "GIB": GIB},
    "trifle": TRIFLE,  # a component that is never more of a peak has no place in a legend: the tooltip names it
    "marks": {"missing": MISSING, "doubt": MARK, "estimate": APPROXIMATELY},
    "colours": {"ink": INK, "blank": BLANK, "on_dark": ON_DARK},
}
