#!/usr/bin/env bash
# The bytes that privacy moves: every method on the preset 1b in bf16 under Nsight Compute, batch 8 and 16, sequence 256
# and 1024; then kernel by kernel at batch 8, sequence 1024; then the counters against known bytes. About 20 minutes on
# an H200. Usage: benchmarks/traffic_grid.sh [OUT]. Parts can be left out: PARTS="check grid kernels" (the default).

OUT="${1:-dpscope-results/traffic-grid}"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PYTHON="${PYTHON:-$([ -x "$HERE/../.venv/bin/python" ] && echo "$HERE/../.venv/bin/python" || echo python3)}"
METHODS="${METHODS:-standard,flat,ghost,flash}"
BATCH_SIZES="${BATCH_SIZES:-8,16}"
SEQ_LENS="${SEQ_LENS:-256,1024}"
BUDGET="${BUDGET:-60}"  # seconds of kernels one by one, each method
STEPS="${STEPS:-5}"
COMMON=(--model 1b --dtype bf16 --optimizer adamw --methods "$METHODS" --warmup 2 --steps "$STEPS" --timeout 400 --resume)

for part in ${PARTS:-check grid kernels}; do
  began=$SECONDS
  echo "=== $part"
  case "$part" in
    check) "$PYTHON" "$HERE/traffic_check.py" --out "$OUT/check" ;;
    grid) "$PYTHON" -m dpscope ncu "${COMMON[@]}" --batch-size "$BATCH_SIZES" --seq-len "$SEQ_LENS" --out "$OUT/grid" ;;
    kernels)
      "$PYTHON" -m dpscope ncu "${COMMON[@]}" --batch-size 8 --seq-len 1024 --per-kernel --budget "$BUDGET" --top 25 \
        --out "$OUT/kernels"
      ;;
  esac
  echo "=== $part ended with exit code $? after $((SECONDS - began)) s"
done

echo
echo "Sizes of the reports (each below 2 MB for a step as a whole):"
find "$OUT" -name '*.ncu-rep' -printf '%10s  %P\n' | sort -k2
