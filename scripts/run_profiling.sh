#!/usr/bin/env bash
# Self-test on the CPU, then torch.profiler runs of every trainer at every size (scripts/profiling_script.py).
# Flags and environment variables go through: BATCH_SIZES=4 SEQ_LENS=512 scripts/run_profiling.sh --dtype bf16

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PYTHON="${PYTHON:-$([ -x "$HERE/../.venv/bin/python" ] && echo "$HERE/../.venv/bin/python" || echo python3)}"
export LOGDIR="${LOGDIR:-./runs}"

echo "=== self-test"
"$PYTHON" "$HERE/profiling_script.py" --mode=test || { echo "!!! FAILED: self-test"; exit 1; }
echo "=== profiling"
"$PYTHON" "$HERE/profiling_script.py" --mode=profile "$@"
status=$?
if [ $status -eq 0 ]; then echo "+++ SUCCESS"; else echo "!!! FAILED: see the lines above (exit $status)"; fi
echo "Look at the results with: tensorboard --logdir=$LOGDIR, then http://localhost:6006"
exit $status
