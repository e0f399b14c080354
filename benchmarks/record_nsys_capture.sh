#!/usr/bin/env bash
# Records the small capture with NVTX ranges that the tests read, strips it of everything that says where it was taken, and
# leaves it in OUT (default $OUT or .): nsys_nvtx_step.sqlite, to be put into tests/data/. Under a minute on a GPU.
#   benchmarks/record_nsys_capture.sh [OUT]
# NSYS and NSYS_LIBS as in nsys_phases.sh.

TARGET="${1:-${OUT:-.}}"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$HERE/nsys_environment.sh"

WORK="$(mktemp -d)"
export DPSCOPE_PLANTED_TOKEN="planted-7f3a9c51e2"
# Ghost clipping: two backward passes launched from autograd's thread, with `clip` within `backward`.
"$PYTHON" -m dpscope nsys --methods ghost --model tiny --num-layers 2 --batch-size 4 --seq-len 64 --dtype bf16 --warmup 2 \
  --captured-steps 2 --trace cuda,nvtx --device cuda --out "$WORK/capture" >"$WORK/log" 2>&1 || tail -n 40 "$WORK/log"
FOUND="$(find "$WORK/capture/files" -name '*.sqlite' 2>/dev/null | head -n 1)"
if [ -z "$FOUND" ]; then
  echo "no SQLite export; what is there:"
  find "$WORK/capture" -type f 2>/dev/null
  tail -n 20 "$WORK"/capture/logs/*.log 2>/dev/null
  [ -n "${NSYS:-}" ] && ls "$(dirname "$NSYS")" "$(dirname "$NSYS")"/../linux-desktop-*/ 2>/dev/null | head -n 60
  exit 1
fi
"$PYTHON" - "$FOUND" <<'PY'
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
print("NVTX_EVENTS:", database.execute("SELECT sql FROM sqlite_master WHERE name = 'NVTX_EVENTS'").fetchone())
PY
echo "planted token in the unstripped export: $(grep -c "$DPSCOPE_PLANTED_TOKEN" "$FOUND") times"
mkdir -p "$TARGET"
"$PYTHON" -m dpscope.instruments.nsys.stripping "$FOUND" "$TARGET/nsys_nvtx_step.sqlite"
cp "$WORK"/capture/results/*.json "$TARGET/nsys_nvtx_step.json" 2>/dev/null
"$PYTHON" -m dpscope nsys --read "$TARGET/nsys_nvtx_step.sqlite"
