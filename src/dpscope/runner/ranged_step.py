"""The program that ncu looks at: `python -m dpscope.runner.ranged_step SPEC [SECONDS]`, SPEC being a run spec as JSON.

Builds the trainer and warms it up, then does exactly one step between `cudaProfilerStart` and `cudaProfilerStop`. In
application-range replay ncu runs it once a pass, so everything it does follows from its arguments. With SECONDS the
range is closed after that long, wherever the step then is: ncu counts kernels up to there and the program ends well.

Whoever starts it learns of its end from one line, `dpscope-outcome: {"status": …, "reason": …}`.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from dpscope.instruments.ncu.reading import PHASE_RANGE
from dpscope.instruments.ncu.running import end_with_lifeline
from dpscope.instruments.phases import listening
from dpscope.results.schema import OK
from dpscope.runner.outcome import outcome_of_exception
from dpscope.runner.spec import RunSpec

OUTCOME = "dpscope-outcome: "


class NvtxPhases:
    """Announces phases as NVTX ranges of the whole process, since autograd launches kernels from threads of its own.

    One range is open at a time: a phase within a phase closes the outer one and opens it again, so that a kernel
    belongs to the innermost.
    """

    def __init__(self) -> None:
        import torch

        self._nvtx = torch.cuda.nvtx
        self._open: list[str] = []
        self._handle: int | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._open.append(name)
        self._show_innermost()
        try:
            yield
        finally:
            self._open.pop()
            self._show_innermost()

    def _show_innermost(self) -> None:
        if self._handle is not None:
            self._nvtx.range_end(self._handle)
        start = self._nvtx.range_start
        self._handle = start(PHASE_RANGE + self._open[-1]) if self._open else None


def run_ranged_step(spec: RunSpec, seconds: float | None = None) -> None:
    import torch

    from dpscope.runner.assembly import make_trainer

    trainer, batch = make_trainer(spec)
    for _ in range(max(spec.warmup, 1)):  # lazily made state and compiled kernels are no part of a step
        trainer.train_step(batch)
    torch.cuda.synchronize()
    with listening(NvtxPhases()), _profiled(seconds):
        trainer.train_step(batch)
        torch.cuda.synchronize()


@contextmanager
def _profiled(seconds: float | None) -> Iterator[None]:
    """What ncu counts: everything in here, or what comes in its first `seconds`."""
    import torch

    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    closing = threading.Timer(seconds, torch.cuda.profiler.stop) if seconds else None
    if closing is not None:
        closing.daemon = True
        closing.start()
    yield
    if closing is not None:
        closing.cancel()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def main() -> int:
    end_with_lifeline()
    status, reason = OK, None
    try:
        run_ranged_step(RunSpec.from_dict(json.loads(sys.argv[1])), *map(float, sys.argv[2:3]))
    except Exception as error:
        traceback.print_exc()
        status, reason = outcome_of_exception(error)
    print(OUTCOME + json.dumps({"status": status, "reason": reason}), flush=True)
    return int(status != OK)


if __name__ == "__main__":
    sys.exit(main())
