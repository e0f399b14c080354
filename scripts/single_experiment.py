#!/usr/bin/env python3
"""One memory experiment, its result as one JSON file: times, peak, breakdown by component, snapshots.

Times and memory are measured in a process each, so that no time is ever taken under the memory tracker.

python scripts/single_experiment.py --experiment vanilla --output vanilla_result.json --seq-len 16384 --batch-size 1
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from door import ends_in_a_sentence

from dpscope.instruments.timing import no_progress
from dpscope.packages import require
from dpscope.results.schema import Result, merge_results
from dpscope.results.store import ResultStore, require_writable, write_atomically
from dpscope.runner.measure import resolve_device
from dpscope.runner.spec import RunSpec
from dpscope.runner.sweep import Limits, launch
from dpscope.vocabulary.settings import DEVICE_CHOICES, DTYPES
from dpscope.workloads.configs import TransformerConfig

# Flag -> the default of the large experiment.
SIZES = {"vocab-size": 32000, "hidden-dim": 2048, "num-layers": 20, "num-heads": 16}
RUN = {"seq-len": 16384, "batch-size": 1, "num-iter": 3, "warmup-iter": 2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", required=True, help="vanilla, ghost, flash_clip, or any dpscope method")
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    for flag, default in {**SIZES, **RUN}.items():
        parser.add_argument(f"--{flag}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--device", choices=DEVICE_CHOICES, default="auto")
    args = parser.parse_args()
    sizes = {flag.replace("-", "_"): getattr(args, flag.replace("-", "_")) for flag in SIZES}
    spec = RunSpec(
        workload=TransformerConfig(name="custom", max_seq_len=args.seq_len, **sizes),
        method=args.experiment,
        batch_size=args.batch_size,
        seq_len=args.seq_len,
        steps=args.num_iter,
        warmup=args.warmup_iter,
        dtype=args.dtype,
        optimizer=args.optimizer,
        device=resolve_device(args.device),
    )
    require("torch")
    require_writable(args.output)
    result = replace(run_experiment(spec), experiment=args.experiment)  # by the name that its reader asked for
    write_atomically(args.output, result.to_json())
    if not result.ok:
        print(f"{result.status}: {result.reason}", file=sys.stderr)
        return 1
    print(f"{spec.label}: {result.timing['median_ms']:.1f} ms a step, peak {result.peak_memory_mb:.1f} MiB")
    print(f"Written: {args.output}")
    return 0


def run_experiment(spec: RunSpec) -> Result:
    """Both measurements, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        store = ResultStore(Path(folder))
        store.create()
        time, memory = (
            launch(replace(spec, instrument=name), store, limits=Limits(), on_progress=no_progress)
            for name in ("time", "memory")
        )
    return merge_results(time, memory)


if __name__ == "__main__":
    with ends_in_a_sentence():
        sys.exit(main())
