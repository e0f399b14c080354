#!/usr/bin/env bash
# The memory experiments side by side, each in a process of its own. One failure does not stop the rest.
#
#   scripts/run_all_experiments.sh
#   SEQ_LEN=1024 BATCH_SIZE=8 OUT=mine scripts/run_all_experiments.sh --dtype bf16
#
# Set from outside: EXPERIMENTS ("vanilla ghost flash_clip"), VOCAB_SIZE, HIDDEN_DIM, NUM_LAYERS, NUM_HEADS, SEQ_LEN,
# BATCH_SIZE, NUM_ITER, WARMUP_ITER, OUT (a folder), PYTHON. Flags are those of scripts/single_experiment.py.
# Exit code: 0, or 1 if an experiment or the figures failed, or 2 for wrong usage.

source "$(dirname "${BASH_SOURCE[0]}")/door.sh"

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

require_some EXPERIMENTS "${EXPERIMENTS[@]}"
"$PYTHON" "$HERE/door.py" "${EXPERIMENTS[@]}" || exit 2  # a wrong name now, not after the experiments before it
mkdir -p "$OUT" || exit 2
failed=()
for experiment in "${EXPERIMENTS[@]}"; do
  echo "=== $experiment: batch $BATCH_SIZE, sequence $SEQ_LEN"
  run "$PYTHON" "$HERE/single_experiment.py" --experiment "$experiment" --output "$OUT/${experiment}_result.json" \
    --vocab-size "$VOCAB_SIZE" --hidden-dim "$HIDDEN_DIM" --num-layers "$NUM_LAYERS" --num-heads "$NUM_HEADS" \
    --seq-len "$SEQ_LEN" --batch-size "$BATCH_SIZE" --num-iter "$NUM_ITER" --warmup-iter "$WARMUP_ITER" "$@"
  case $? in
    0) echo "+++ SUCCESS: $experiment" ;;
    2) exit 2 ;;  # wrong usage or set-up: the next would say the same
    *) echo "!!! FAILED: $experiment"; failed+=("$experiment") ;;
  esac
done

echo
run "$PYTHON" "$HERE/visualize_memory_breakdown.py" --input-dir "$OUT" --output-dir "$OUT/visualizations" \
  || failed+=(figures)
echo
echo "Results: $OUT"
[ ${#failed[@]} -eq 0 ] || echo "Failed: ${failed[*]}"
exit $((${#failed[@]} > 0))
