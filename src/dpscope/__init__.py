"""dpscope: see what privacy costs, then stop paying it.

Importing this package imports neither torch nor a GPU; the names below are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpscope.places import names_at
from dpscope.vocabulary.version import __version__ as __version__

if TYPE_CHECKING:
    from dpscope.audit.check import check_loop as check_loop
    from dpscope.audit.loop import Loop as Loop
    from dpscope.comparison import Comparison as Comparison
    from dpscope.comparison import compare as compare
    from dpscope.errors import UserError as UserError
    from dpscope.exactness.check import check as check
    from dpscope.forecast.physical_batch import find_physical_batch as find_physical_batch
    from dpscope.forecast.plan import plan as plan
    from dpscope.runner.planning import make_sweep as make_sweep
    from dpscope.runner.spec import RunSpec as RunSpec
    from dpscope.workloads.configs import make_config as make_config
    from dpscope.workloads.workload import Workload as Workload

__getattr__, __all__ = names_at(
    __name__,
    {
        "audit.check": "check_loop",
        "audit.loop": "Loop",
        "comparison": "Comparison compare",
        "errors": "UserError",
        "exactness.check": "check",
        "forecast.physical_batch": "find_physical_batch",
        "forecast.plan": "plan",
        "runner.planning": "make_sweep",
        "runner.spec": "RunSpec",
        "workloads.configs": "make_config",
        "workloads.workload": "Workload",
    },
)
__all__ += ["__version__"]


def __dir__() -> list[str]:
    return sorted(__all__)
