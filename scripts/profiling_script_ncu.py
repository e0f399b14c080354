#!/usr/bin/env python3
"""One configuration a process, to be run under Nsight Compute: 3 warm-up and 5 active steps, no torch.profiler.

python scripts/profiling_script_ncu.py --mode=test
python scripts/profiling_script_ncu.py --trainer=dpsgd --batch_size=8 --seq_len=256
python -m dpscope.instruments.ncu report.ncu-rep python scripts/profiling_script_ncu.py --trainer=dpsgd

Only the active steps are counted: they stand between cudaProfilerStart and cudaProfilerStop.
"""

import argparse
import sys

from door import ends_in_a_sentence

from dpscope.commands.ncu import guide_text
from dpscope.commands.selftest import run_local_test
from dpscope.errors import UserError
from dpscope.instruments.processes import end_with_lifeline
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.settings import DTYPES
from dpscope.workloads.configs import PRESETS, make_config

WARMUP_STEPS, ACTIVE_STEPS = 3, 5


def run_gpu_profile_step(
    model: str, trainer_name: str, batch_size: int, seq_len: int, dtype: str, active_steps: int
) -> None:
    """What ncu looks at: a trainer of the ~1B-parameter model on the GPU."""
    spec = RunSpec(
        workload=make_config(model),
        method=trainer_name,
        batch_size=batch_size,
        seq_len=seq_len,
        dtype=dtype,
        device="cuda",
    )
    import torch

    from dpscope.runner.steps import make_trainer

    trainer, batch = make_trainer(spec)
    print(f"Running {WARMUP_STEPS} warm-up steps of {spec.label} ...", flush=True)
    for _ in range(WARMUP_STEPS):
        trainer.train_step(batch)
    torch.cuda.synchronize()
    print(f"Running {active_steps} profiled steps ...", flush=True)
    torch.cuda.profiler.start()
    for _ in range(active_steps):
        trainer.train_step(batch)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    print("Profiled steps finished.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["test", "profile"], default="profile")
    parser.add_argument("--trainer", default="standard", help="standard, dpsgd, dpsgd_ghost, or any dpscope method")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=256)
    parser.add_argument("--active_steps", type=int, default=ACTIVE_STEPS)
    parser.add_argument("--model", choices=list(PRESETS), default="1b")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--guide", action="store_true", help="print how to read the reports, and run nothing")
    args = parser.parse_args()
    if args.guide:
        print(guide_text(), end="")
        return 0
    if args.mode == "test":
        return 0 if run_local_test() else 1
    if args.active_steps < 1:
        parser.error(f"--active_steps must be at least 1, not {args.active_steps}")
    end_with_lifeline()
    import torch

    if not torch.cuda.is_available():
        raise UserError("--mode=profile needs a CUDA device; --mode=test runs on the CPU")
    run_gpu_profile_step(args.model, args.trainer, args.batch_size, args.seq_len, args.dtype, args.active_steps)
    return 0


if __name__ == "__main__":
    with ends_in_a_sentence():
        sys.exit(main())
