#!/usr/bin/env bash
# The headline grid: every method on the preset 1b, from long sequences to short ones. About ten minutes on an H200.
# Results go to OUT (default dpscope-results/flash-grid), one folder a part; METHODS and STEPS can be set from outside.
# Then eight shapes that nobody chose, drawn from SEED, another one every time unless it is given (SEED=0: none).

OUT="${OUT:-dpscope-results/flash-grid}"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PYTHON="${PYTHON:-$([ -x "$HERE/../.venv/bin/python" ] && echo "$HERE/../.venv/bin/python" || echo python3)}"
METHODS="${METHODS:-standard,flat,ghost,flash}"
STEPS="${STEPS:-7}"

part() {  # NAME BATCH_SIZES SEQ_LEN DTYPE WARMUP STEPS
  "$PYTHON" -m dpscope compare --model 1b --optimizer adamw --methods "$METHODS" --out "$OUT/$1" --resume \
    --batch-size "$2" --seq-len "$3" --dtype "$4" --warmup "$5" --steps "$6" --timeout 300 | sed -n '/^method/,/^$/p'
}

part bf16-16384 1 16384 bf16 3 5
part bf16-1024 8,16 1024 bf16 3 "$STEPS"
part bf16-256 16,32 256 bf16 3 "$STEPS"
part fp32-16384 1 16384 fp32 1 2

SEED="${SEED:-$((1 + RANDOM))}"
[ "$SEED" = 0 ] || "$PYTHON" "$HERE/seeded_grid.py" "$OUT/seeded" --seed "$SEED"
