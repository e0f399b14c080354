#!/usr/bin/env bash
# Memory by component of every method on the preset 1b, bf16: 8 × 1024 and 1 × 16384. A few minutes on an H200.
# benchmarks/memory_components.sh [DIR]: results go to DIR (default dpscope-results/memory-components), one folder a size.

OUT="${1:-dpscope-results/memory-components}"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PYTHON="${PYTHON:-$([ -x "$HERE/../.venv/bin/python" ] && echo "$HERE/../.venv/bin/python" || echo python3)}"
MODEL="${MODEL:-1b}"
METHODS="${METHODS:-standard,flat,ghost,flash}"

part() {  # NAME BATCH_SIZE SEQ_LEN
  "$PYTHON" -m dpscope memory --model "$MODEL" --dtype bf16 --optimizer adamw --methods "$METHODS" --batch-size "$2" \
    --seq-len "$3" --warmup 2 --steps 1 --timeout 240 --out "$OUT/$1" --resume ${FLAGS:-} | grep -E '^\[|^(oom|failed|timeout)'
}

part 8x1024 8 1024
part 1x16384 1 16384

"$PYTHON" - "$OUT" <<'TABLE'
import json, sys
from pathlib import Path

print(f"{'size':<9}{'method':<10}{'tracked GiB':>12}{'requested GiB':>14}{'less cuBLAS':>12}{'ratio':>9}"
      f"{'unattributed':>14}{'of which cuBLAS':>17}")
for path in sorted(Path(sys.argv[1]).glob("*/results/*-memory-*.json"), key=lambda p: (p.parts[-3], p.stat().st_mtime)):
    result = json.loads(path.read_text())
    memory, size = result["memory"], path.parts[-3]
    if result["status"] != "ok":
        print(f"{size:<9}{result['experiment']:<10} {result['status']}: {result['reason']}")
        continue
    tracked, requested = memory["tracked_peak_bytes"], memory.get("peak_requested_bytes", memory["peak_bytes"])
    workspaces = memory.get("cublas_workspace_bytes", 0)
    unattributed = memory["peak"]["components"]["unattributed"] / memory["peak_bytes"]
    print(f"{size:<9}{result['experiment']:<10}{tracked / 2**30:>12.3f}{requested / 2**30:>14.3f}"
          f"{(requested - workspaces) / 2**30:>12.3f}{tracked / (requested - workspaces):>9.5f}{unattributed:>13.3%}"
          f"{workspaces / memory['peak_bytes']:>17.3%}")
TABLE
