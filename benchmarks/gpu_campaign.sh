#!/usr/bin/env bash
# Everything that a GPU has to show, in parts of less than ten minutes, each of which can be run by itself:
#
#   benchmarks/gpu_campaign.sh OUT tests | models | graphs | price | plan
#
# tests   tests/gpu, and random models held against micro-batches of one
# models  models that nobody tuned for, first steps, checkpointed blocks by clipping rule
# graphs  steps as CUDA graphs, eager and compiled
# price   flash clipping next to ordinary training, at every size of the price table
# plan    `dpscope plan` held against measured peaks, times and largest batches
#
# A part ends when its time is over. What it has written by then is under OUT, and its last lines are the table.
# Without a GPU the same commands run at tiny sizes, as far as they can: does each of them start?
set -u
cd "$(dirname "$0")/.."
[ $# -eq 2 ] || { sed -n '2,13p' "$0" | cut -c3-; exit 2; }
out=$1 part=$2
mkdir -p "$out"
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  gpu=1 device=cuda tiny='' batches='8 32' fuzz=220
else
  gpu='' device=cpu tiny=--tiny batches=2 fuzz=10
fi
within() {  # seconds, command
  echo "==> $2"
  timeout "$1" bash -c "$2" || echo "==> ended with $? after at most $1 s: $2"
}

case $part in
tests)
  [ -n "$gpu" ] && within 330 "python -m pytest tests/gpu -q -x -p no:cacheprovider 2>&1 | tail -n 15"
  within 230 "python -m tests.fuzz.many --models 500 --first 200000 --seconds $fuzz --device $device" ;;
models)
  within 300 "python benchmarks/any_model.py '$out' $tiny"
  within 120 "python benchmarks/first_step.py --device $device"
  within 150 "python benchmarks/checkpointed.py --kinds per_layer lean --batch $batches --out '$out'" ;;
graphs)
  within 570 "python benchmarks/graphed.py '$out' --budget 540 $tiny" ;;
price)
  within 570 "python benchmarks/price_table.py '$out' --by-hand --steps 8" ;;
plan)
  within 540 "python benchmarks/plan_accuracy.py measure '$out' --seed 4 --seconds 500"
  within 30 "python benchmarks/plan_accuracy.py report '$out'" ;;
*)
  echo "no part is called $part: tests, models, graphs, price or plan"; exit 2 ;;
esac
