#!/usr/bin/env bash
# Where the time of a step goes on a GPU: the preset 1b in bf16, batch 8, sequence 1024, every method, recorded with
# torch.profiler. About three minutes on an H200. Everything goes to OUT; what is printed last is short.
#   benchmarks/traces.sh [OUT]        METHODS, STEPS and FLAGS can be set from outside

OUT="${1:-dpscope-results/traces}"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PYTHON="${PYTHON:-$([ -x "$HERE/../.venv/bin/python" ] && echo "$HERE/../.venv/bin/python" || echo python3)}"
mkdir -p "$OUT" || exit 2

# shellcheck disable=SC2086  # FLAGS are several words
"$PYTHON" -m dpscope trace --model 1b --dtype bf16 --batch-size 8 --seq-len 1024 --warmup 2 --steps "${STEPS:-5}" \
  --methods "${METHODS:-standard,flat,ghost,flash}" --timeout 300 --out "$OUT/sweep" --resume --logdir "$OUT/runs" \
  $FLAGS > "$OUT/log.txt" 2>&1
status=$?
[ $status -eq 0 ] || { echo "dpscope trace ended with $status:"; tail -n 20 "$OUT/log.txt"; }
"$PYTHON" - "$OUT/sweep" <<'PYTHON'
import sys
from pathlib import Path

from dpscope.reports.report import compare_results
from dpscope.reports.trace.data import differences, traced
from dpscope.results.store import ResultStore

folder = Path(sys.argv[1])
results, _ = ResultStore(folder).read_all()
rows = sorted(compare_results(results.values()), key=lambda row: row.method != "standard")
for steps in traced(rows):
    print("method    unprofiled   traced  GPU busy  GPU idle  kernels   trace file")
    for step in steps:
        gpu = step.gpu or dict.fromkeys(("busy_ms", "idle_ms", "kernels"), 0.0)
        size = sum(step.trace["files"].values()) / 2**20
        print(f"{step.method:9} {step.row.median_ms or 0:8.1f} ms {step.trace['step_ms']:8.1f} {gpu['busy_ms']:9.1f} "
              f"{gpu['idle_ms']:9.1f} {gpu['kernels']:8.0f} {size:8.2f} MiB")
    print("\nGPU ms by phase (host ms)")
    for step in steps:
        parts = ", ".join(f"{p['phase']} {p['gpu_ms']:.1f} ({p['cpu_ms']:.1f})" for p in step.trace["phases"])
        print(f"{step.method:9} {parts}")
    for step in steps:
        if step.bound:
            print(f"{step.method:9} {step.bound}")
    for found in differences(steps):
        print(f"\n{found.method} takes {found.total_ms:+.2f} ms more than standard ({found.basis} time); most of it:")
        for change in found.changes[:3]:
            print(f"  {change.ms:+8.2f} ms  {change.operator} in {change.phase} ({change.kind})")
PYTHON
echo
echo "The whole summary: $OUT/sweep/summary.txt"
exit $status
