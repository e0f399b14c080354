"""What nsys looks at: `python -m dpscope.runner.captured_steps SPEC [--keep-going]`, where SPEC is a run spec as JSON.

Builds the trainer and warms it up, then does a few steps between `cudaProfilerStart` and `cudaProfilerStop`, each step
and each phase an NVTX range. With --keep-going it trains until it is ended, for recordings that are started by hand.

Whoever starts it learns of its end from one line, `dpscope-outcome: {"status": …, "reason": …}`.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from dpscope.instruments.nvtx import nvtx_phases, nvtx_range
from dpscope.instruments.phases import STEP
from dpscope.results.schema import OK
from dpscope.runner.outcome import outcome_of_exception
from dpscope.runner.spec import RunSpec

OUTCOME = "dpscope-outcome: "
KEEP_GOING = "--keep-going"


def run_captured_steps(spec: RunSpec, *, keep_going: bool = False) -> None:
    from dpscope.runner.assembly import make_trainer

    trainer, batch = make_trainer(spec)

    def step() -> None:
        with nvtx_range(STEP):
            trainer.train_step(batch)

    for _ in range(max(spec.warmup, 1)):  # lazily made state and compiled kernels are no part of a step
        trainer.train_step(batch)
    with _captured(spec.device), nvtx_phases(autograd=spec.option("autograd")):
        for _ in range(spec.option("captured_steps")):
            step()
        _synchronise(spec.device)  # within the capture: nothing that the steps launched is cut off
        said = 0.0
        while keep_going:
            step()
            _synchronise(spec.device)
            if time.monotonic() - said > 5:
                said = time.monotonic()
                print(
                    f"{time.strftime('%H:%M:%S')} training: start recording when you like; Ctrl-C ends it", flush=True
                )


@contextmanager
def _captured(device: str) -> Iterator[None]:
    if device != "cuda":
        yield
        return
    import torch

    _synchronise(device)
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def _synchronise(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def main() -> int:
    status, reason = OK, None
    try:
        run_captured_steps(RunSpec.from_dict(json.loads(sys.argv[1])), keep_going=KEEP_GOING in sys.argv[2:])
    except KeyboardInterrupt:
        pass
    except Exception as error:
        traceback.print_exc()
        status, reason = outcome_of_exception(error)
    print(OUTCOME + json.dumps({"status": status, "reason": reason}), flush=True)
    return int(status != OK)


if __name__ == "__main__":
    sys.exit(main())
