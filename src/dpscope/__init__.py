"""dpscope: see what privacy costs, then stop paying it.

Importing this package imports neither torch nor a GPU; the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dpscope.vocabulary.version import __version__

if TYPE_CHECKING:
    from dpscope.audit.check import check_loop
    from dpscope.audit.loop import Loop
    from dpscope.comparison import Comparison, compare
    from dpscope.errors import UserError
    from dpscope.exactness.check import check
    from dpscope.forecast.physical_batch import find_physical_batch
    from dpscope.forecast.plan import plan
    from dpscope.runner.planning import make_sweep
    from dpscope.runner.spec import RunSpec
    from dpscope.workloads.configs import make_config
    from dpscope.workloads.workload import Workload

_HOMES = {
    "Comparison": "dpscope.comparison",
    "Loop": "dpscope.audit.loop",
    "RunSpec": "dpscope.runner.spec",
    "UserError": "dpscope.errors",
    "Workload": "dpscope.workloads.workload",
    "check": "dpscope.exactness.check",
    "check_loop": "dpscope.audit.check",
    "compare": "dpscope.comparison",
    "find_physical_batch": "dpscope.forecast.physical_batch",
    "make_config": "dpscope.workloads.configs",
    "make_sweep": "dpscope.runner.planning",
    "plan": "dpscope.forecast.plan",
}

__all__ = [
    "Comparison",
    "Loop",
    "RunSpec",
    "UserError",
    "Workload",
    "__version__",
    "check",
    "check_loop",
    "compare",
    "find_physical_batch",
    "make_config",
    "make_sweep",
    "plan",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dpscope' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
