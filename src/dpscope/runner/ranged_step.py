"""The program that ncu and nsys look at: `python -m dpscope.runner.ranged_step SPEC [MORE]`, SPEC a run spec as JSON.

It warms the trainer up, then runs between `cudaProfilerStart` and `cudaProfilerStop`. Its last line reports the
outcome: `dpscope-outcome: {"status": …, "reason": …}`.

**ncu**: exactly one step, run once a pass. MORE is a number of seconds after which the range is closed, wherever the
step then is; if ncu continues to count, the program ends, and ncu keeps its counts.

**nsys**: a few steps, each an NVTX range around its phases. MORE is `--keep-going`: train until ended, for recordings
that are started by hand.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dpscope.endings import outcome_of_exception
from dpscope.instruments.ncu.reading import PHASE_RANGE
from dpscope.instruments.processes import end_with_lifeline
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.phases import STEP, listening
from dpscope.vocabulary.statuses import ALL_OK, OK, SOME_NOT_OK

if TYPE_CHECKING:
    from dpscope.runner.steps import TrainingSteps

OUTCOME = "dpscope-outcome: "
KEEP_GOING = "--keep-going"
GRACE = 5.0  # seconds for a step to end after its range was closed


def program(spec: RunSpec, *more: str) -> list[str]:
    """Return the command line that runs this file."""
    return [sys.executable, "-m", "dpscope.runner.ranged_step", json.dumps(spec.to_dict()), *more]


def read_outcome(line: str) -> dict[str, str] | None:
    """Return the outcome in a line that the program printed; None if there is none. The line goes to the row's log."""
    print(line, end="", flush=True)
    return json.loads(line.removeprefix(OUTCOME)) if line.startswith(OUTCOME) else None


def run_ranged_step(spec: RunSpec, seconds: float | None = None) -> None:
    """Take one step, which ncu counts."""
    from dpscope.instruments.nvtx import ProcessRanges

    step = _warmed_up(spec)
    with listening(ProcessRanges(PHASE_RANGE)), _profiled(seconds):
        step()
        _synchronise()
    step.require_finite()


def run_captured_steps(spec: RunSpec, *, keep_going: bool = False) -> None:
    """Take the steps that nsys records."""
    from dpscope.instruments.nvtx import nvtx_phases, nvtx_range

    train = _warmed_up(spec)

    def step() -> None:
        with nvtx_range(STEP):
            train()

    with _profiled(), nvtx_phases(autograd=spec.option("autograd")):
        for _ in range(spec.option("captured_steps")):
            step()
        _synchronise()  # within the capture: nothing that the steps launched is cut off
        said = 0.0
        while keep_going:
            step()
            train.require_finite_losses()  # which waits for the step
            if time.monotonic() - said > 5:
                said = time.monotonic()
                print(f"{time.strftime('%H:%M:%S')} training: record when you like; Ctrl-C ends it", flush=True)
    train.require_finite()


def _warmed_up(spec: RunSpec) -> TrainingSteps:
    from dpscope.runner.steps import TrainingSteps

    step = TrainingSteps(spec, warmup=max(spec.warmup, 1))  # lazily made state and compiled kernels are no part of one
    step.warm_up()
    _synchronise()
    return step


def _synchronise() -> None:
    import torch

    torch.cuda.synchronize()


@contextmanager
def _profiled(seconds: float | None = None) -> Iterator[None]:
    """Record the block, or its first `seconds`, with the profiler."""
    import torch

    ended = threading.Event()

    def close_in_time() -> None:
        if not ended.wait(seconds):
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
            if not ended.wait(GRACE):
                _say_outcome(OK, None)
                os._exit(ALL_OK)

    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    if seconds:
        threading.Thread(target=close_in_time, daemon=True).start()
    yield
    ended.set()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def _say_outcome(status: str, reason: str | None) -> None:
    print(OUTCOME + json.dumps({"status": status, "reason": reason}), flush=True)


def main() -> int:
    end_with_lifeline()
    status, reason = OK, None
    spec, more = RunSpec.from_dict(json.loads(sys.argv[1])), sys.argv[2:]
    try:
        if spec.instrument == "nsys":
            run_captured_steps(spec, keep_going=KEEP_GOING in more)
        else:
            run_ranged_step(spec, *map(float, more))
    except KeyboardInterrupt:
        pass  # how --keep-going ends
    except Exception as error:
        traceback.print_exc()
        status, reason = outcome_of_exception(error)
    _say_outcome(status, reason)
    return ALL_OK if status == OK else SOME_NOT_OK


if __name__ == "__main__":
    sys.exit(main())
