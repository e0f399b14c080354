"""The bytes a step has to move, from the sizes of its operators' tensors: for machines whose counters cannot be read.

One step runs under a dispatch mode. Every operator counts its inputs as read and its outputs as written once, in full
(see operators.py), and kernels that the dispatcher does not see announce theirs (see launches.py). That is what would
pass through DRAM if no operator left anything in a cache for the next one and none read anything twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpscope.instruments.families import operator_family
from dpscope.instruments.operators import Moved, distinct_tensors, flops_of, moved_by, operator_name, tensor_bytes
from dpscope.instruments.sums import Sums
from dpscope.results.payloads.ncu import Estimate
from dpscope.vocabulary import launches, phases

BLIND_SPOTS = (
    "Caches are not seen: what one operator leaves in L2 for the next is counted as DRAM traffic (too high).",
    "Tiles are not seen: a matrix product that reads its operands several times is counted as reading them once, and "
    "so are sorts and other operators of several passes (too low).",
    "Workspaces inside an operator are not seen: split-K partial sums, attention's float32 gradients (too low).",
    "Floating-point operations are those of matrix products, convolutions and attention, causal attention in full.",
    "Compiled code is counted as the operators it was compiled from, without fusion.",
)

ON_A_CPU = (
    "The step ran on a CPU, whose operators are not a GPU's: the optimizer is not fused, and flash clipping runs "
    "without its kernels."
)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up operators by (name, family, phase). Autograd takes the mode along into its own threads."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.sums = Sums("calls", "dram_read_bytes", "dram_write_bytes", "flops")
        self._phases: list[str] = []

    @property
    def phase(self) -> str | None:
        return self._phases[-1] if self._phases else None

    @contextmanager
    def enter_phase(self, name: str) -> Iterator[None]:
        self._phases.append(name)
        try:
            yield
        finally:
            self._phases.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        moved = moved_by(func, args, kwargs, out, self.device)
        if any(moved):
            shapes = [argument.shape for argument in args if isinstance(argument, Tensor)]
            family = operator_family(operator_name(func), shapes, self.phase)
            self._add(func._schema.name, family, moved, flops_of(func, args, kwargs, out))
        return out

    def hear(self, launch: launches.Launch) -> None:
        sizes = (sum(map(tensor_bytes, distinct_tensors(tensors))) for tensors in (launch.reads, launch.writes))
        self._add(launch.name, launch.family, Moved(*sizes), launch.flops)

    def _add(self, name: str, family: str, moved: Moved, flops: int) -> None:
        self.sums.add((name, family, self.phase), 1, moved.read, moved.written, flops)


def estimate_traffic(step: Callable[[], object], *, device: str) -> Estimate:
    """Return the bytes that one `step` reads and writes on `device`, by operator and phase; most bytes first.

    The step is an ordinary one: it trains, and nothing is left behind.
    """
    counter = _Counter(device)
    with phases.listening(counter.enter_phase), launches.hearing(counter.hear), counter:
        step()
    rows = counter.sums.rows("calls", "name", "family", "phase")
    rows = [{**row, "l2_to_sm_bytes": None, "time_ns": None} for row in rows]
    rows.sort(key=lambda row: -(row["dram_read_bytes"] + row["dram_write_bytes"]))
    calls = sum(row["calls"] for row in rows)
    return {
        "dram_read_bytes": sum(row["dram_read_bytes"] for row in rows),
        "dram_write_bytes": sum(row["dram_write_bytes"] for row in rows),
        "flops": {"total": sum(row["flops"] for row in rows)},
        "kernels": {"rows": rows, "calls_seen": calls, "calls_total": calls, "note": "by operator, from tensor sizes"},
        "blind_spots": [*([ON_A_CPU] if device == "cpu" else []), *BLIND_SPOTS],
    }
