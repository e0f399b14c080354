#!/usr/bin/env bash
# The memory experiments side by side, each in a process of its own. One failure does not stop the rest.
# Every size can be set from outside: SEQ_LEN=1024 BATCH_SIZE=8 scripts/run_all_experiments.sh

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PYTHON="${PYTHON:-$([ -x "$HERE/../.venv/bin/python" ] && echo "$HERE/../.venv/bin/python" || echo python3)}"

read -r -a EXPERIMENTS <<< "${EXPERIMENTS:-vanilla ghost flash_clip}"
VOCAB_SIZE="${VOCAB_SIZE:-32000}"
HIDDEN_DIM="${HIDDEN_DIM:-2048}"
NUM_LAYERS="${NUM_LAYERS:-20}"
NUM_HEADS="${NUM_HEADS:-16}"
SEQ_LEN="${SEQ_LEN:-16384}"
BATCH_SIZE="${BATCH_SIZE:-1}"
NUM_ITER="${NUM_ITER:-3}"
WARMUP_ITER="${WARMUP_ITER:-2}"
OUT="${OUT:-memory_profiling_results/run_$(date +%Y%m%d_%H%M%S)}"

mkdir -p "$OUT" || exit 2
failed=()
for experiment in "${EXPERIMENTS[@]}"; do
  echo "=== $experiment: batch $BATCH_SIZE, sequence $SEQ_LEN"
  if "$PYTHON" "$HERE/single_experiment.py" --experiment "$experiment" --output "$OUT/${experiment}_result.json" \
      --vocab-size "$VOCAB_SIZE" --hidden-dim "$HIDDEN_DIM" --num-layers "$NUM_LAYERS" --num-heads "$NUM_HEADS" \
      --seq-len "$SEQ_LEN" --batch-size "$BATCH_SIZE" --num-iter "$NUM_ITER" --warmup-iter "$WARMUP_ITER" "$@"; then
    echo "+++ SUCCESS: $experiment"
  else
    echo "!!! FAILED: $experiment"
    failed+=("$experiment")
  fi
done

echo
"$PYTHON" "$HERE/visualize_memory_breakdown.py" --input-dir "$OUT" --output-dir "$OUT/visualizations"
echo
echo "Results: $OUT"
[ ${#failed[@]} -eq 0 ] || echo "Failed: ${failed[*]}"
exit $((${#failed[@]} > 0))
