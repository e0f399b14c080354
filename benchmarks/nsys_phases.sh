#!/usr/bin/env bash
# GPU time by phase from Nsight Systems: preset 1b, bf16, batch 8, sequence 1024, every method. A few minutes on an H200.
#   benchmarks/nsys_phases.sh OUT
# NSYS: the nsys to use (else searched for, also inside Nsight Compute). NSYS_LIBS: a folder with libraries that its importer
# lacks (libdw.so.1, libelf.so.1, liblzma.so.5, libbz2.so.1.0). METHODS, MODEL, BATCH, SEQ can be set from outside.
# Where `dpscope trace` is there too, torch.profiler looks at the same rows and the two are compared.

OUT="${1:-dpscope-results/nsys-phases}"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$HERE/nsys_environment.sh"

ROWS=(--model "${MODEL:-1b}" --dtype bf16 --methods "${METHODS:-standard,flat,ghost,flash}" --batch-size "${BATCH:-8}"
      --seq-len "${SEQ:-1024}" --warmup 2 --steps 5 --device cuda --timeout 240 --out "$OUT")
# A secret that must not be found in any report.
export DPSCOPE_PLANTED_TOKEN="planted-7f3a9c51e2"

mkdir -p "$OUT"
"$PYTHON" -m dpscope nsys "${ROWS[@]}" --resume >"$OUT/nsys.log" 2>&1 || tail -n 30 "$OUT/nsys.log"
if "$PYTHON" -m dpscope trace --help >/dev/null 2>&1; then
  "$PYTHON" -m dpscope trace "${ROWS[@]}" --no-log --resume >"$OUT/trace.log" 2>&1 || tail -n 30 "$OUT/trace.log"
fi
"$PYTHON" -m dpscope report "$OUT" >"$OUT/report.log" 2>&1
sed -n '/^Nsight Systems/,/^GPU time: kernels/p' "$OUT/report.log"
grep -E 'torch.profiler (agree|DISAGREE)|^(failed|oom|skipped|timeout):' -A2 "$OUT/report.log"
find "$OUT/files" -name '*.nsys-rep' -o -name '*.sqlite' -o -name '*.qdstrm' | xargs -r ls -la | awk '{print $5, $NF}'
# Reports are compressed in parts: the export is searched as well, and holds all that nsys recorded.
if grep -rlq "$DPSCOPE_PLANTED_TOKEN" "$OUT/files"; then echo "LEAK: the planted token is in a report"; else echo "planted token: in no report"; fi
