"""Many runs of changing models, with counts: `python -m tests.fuzz.many --models 2000 --first 10000 [--device cuda]`.

Prints every run that is wrong, and at the end how many were exact, refused though nothing mixes, and found to mix.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter

import torch

from tests.fuzz.changing_models import make_run
from tests.fuzz.judging import Wrong, judge


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other run after so long")
    parser.add_argument("--refusals", action="store_true", help="print refusals, too")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    counts: Counter[str] = Counter()
    begin = time.monotonic()
    for seed in range(options.first, options.first + options.models):
        if time.monotonic() - begin > options.seconds:
            break
        try:
            run = make_run(seed, options.device)
            verdict = judge(run)
            counts[verdict.kind] += 1
            if options.refusals and verdict.kind in ("refused", "error", "unseen", "untrainable"):
                print(f"{verdict.kind}: {run}\n    {verdict.detail}", flush=True)
        except Wrong as wrong:
            counts["wrong"] += 1
            print(f"WRONG {wrong}", flush=True)
        except Exception as error:
            counts["failed"] += 1
            print(f"FAILED seed {seed}: {type(error).__name__}: {error}", flush=True)
    total = sum(counts.values())
    print(f"{total} models in {time.monotonic() - begin:.0f} s on {options.device}: {dict(counts)}")
    return 1 if counts["wrong"] or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
