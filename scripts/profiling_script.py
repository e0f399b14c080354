#!/usr/bin/env python3
"""torch.profiler runs of ordinary, DP-SGD and ghost-clipped training, with a TensorBoard log in ./runs.

python scripts/profiling_script.py --mode=test
python scripts/profiling_script.py --mode=profile
python scripts/profiling_script.py --mode=profile --batch_sizes 2 --seq_lens 64 --trainers standard,dpsgd

With CUDA: about 1B parameters, batch 4 and 8, sequence 512 and 1024. Without: about 1M, batch 2 and 4, sequence 256
and 512. Each flag of a size can also be set as an environment variable: BATCH_SIZES=2 SEQ_LENS=64 TRAINERS=standard
"""

import argparse
import os
import sys

from door import ends_in_a_sentence

from dpscope.cli import main as dpscope
from dpscope.commands.selftest import run_local_test

# Device -> model, batch sizes, sequence lengths.
EXPERIMENTS = {
    "cuda": {"model": "1b", "batch_sizes": "4,8", "seq_lens": "512,1024"},
    "cpu": {"model": "tiny", "batch_sizes": "2,4", "seq_lens": "256,512"},
}
TRAINERS = "standard,dpsgd,dpsgd_ghost"


def find_device() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    print("No CUDA device: profiling the ~1M-parameter model on the CPU instead.", flush=True)
    return "cpu"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--mode", choices=["test", "profile"], default="profile")
    parser.add_argument("--trainers", default=os.environ.get("TRAINERS", TRAINERS), help=f"default {TRAINERS}")
    for name in ("model", "batch_sizes", "seq_lens"):
        parser.add_argument(f"--{name}", default=os.environ.get(name.upper()), help="default by device, as above")
    parser.add_argument("--logdir", default=os.environ.get("LOGDIR", "runs"), help="TensorBoard log, default ./runs")
    args, further = parser.parse_known_args()
    if args.mode == "test":
        if further:
            parser.error(f"--mode=test takes no {' '.join(further)}")
        return 0 if run_local_test() else 1
    device = find_device()
    sizes = {name: getattr(args, name) or default for name, default in EXPERIMENTS[device].items()}
    command = ["trace", "--device", device, "--methods", args.trainers, "--model", sizes["model"]]
    command += ["--batch-size", sizes["batch_sizes"], "--seq-len", sizes["seq_lens"], "--logdir", args.logdir]
    command += ["--memory"]  # by operator, and over time in TensorBoard
    print(f"dpscope {' '.join([*command, *further])}", flush=True)
    dpscope([*command, *further])  # any further flag is dpscope's: --stacks, --dtype bf16, --out DIR
    return 0


if __name__ == "__main__":
    with ends_in_a_sentence():
        sys.exit(main())
