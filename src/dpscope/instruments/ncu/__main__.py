"""`python -m dpscope.instruments.ncu REPORT PROGRAM…`: count what a program does between profiler start and stop.

For shell scripts: finds ncu, asks it for dpscope's metrics without those that this GPU does not have, ends it when it
hangs, and says in a sentence why there is no report. Exits with 0, or 1 without a report, or 2 without an ncu.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from dpscope.endings import ends_in_a_sentence
from dpscope.errors import UserError
from dpscope.instruments.ncu.metrics import RANGE_METRICS, resolve_metrics
from dpscope.instruments.ncu.running import NO_NCU, find_ncu, ncu_version, range_command, take_report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dpscope.instruments.ncu", description=__doc__)
    parser.add_argument("--version", action="store_true", help="say which ncu would be used, and stop")
    parser.add_argument("--metrics", default="", help="more metrics, by ncu's or nvprof's names: a,b")
    parser.add_argument("--limit", type=float, default=600, help="seconds before a hanging ncu is ended")
    parser.add_argument("--log", type=Path, help="where the output of ncu and of the program goes")
    parser.add_argument("report", type=Path, nargs="?")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    ncu = find_ncu()
    if ncu is None:
        raise UserError(NO_NCU)
    if args.version:
        print(f"Nsight Compute {ncu_version(ncu) or '(version unknown)'}: {ncu}")
        return 0
    if args.report is None or not args.program:
        parser.error("give a REPORT and a PROGRAM")
    metrics = resolve_metrics([*RANGE_METRICS, *filter(None, args.metrics.split(","))])
    taken = take_report(
        lambda names: range_command(ncu, args.program, args.report, names), metrics, args.report, limit=args.limit
    )
    if args.log is not None:
        args.log.write_text(f"$ {shlex.join(taken.command)}\n{taken.output}", encoding="utf-8")
    if taken.refused:
        print(f"Left out, since this GPU or this ncu does not know it: {', '.join(taken.refused)}")
    if taken.failure is not None:
        print(f"Error: {taken.failure}", file=sys.stderr)
    return int(taken.failure is not None)


if __name__ == "__main__":
    with ends_in_a_sentence():
        sys.exit(main())
