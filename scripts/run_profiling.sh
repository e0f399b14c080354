#!/usr/bin/env bash
# Self-test on the CPU, then torch.profiler runs of every trainer at every size (scripts/profiling_script.py).
#
#   scripts/run_profiling.sh
#   BATCH_SIZES=4 SEQ_LENS=512 scripts/run_profiling.sh --dtype bf16
#
# Set from outside: TRAINERS (standard,dpsgd,dpsgd_ghost), MODEL, BATCH_SIZES (4,8), SEQ_LENS (512,1024), LOGDIR (./runs),
# PYTHON. Flags are those of scripts/profiling_script.py and of `dpscope trace`.
# Exit code: 0, or 1 if the self-test or a row failed, or 2 for wrong usage.

source "$(dirname "${BASH_SOURCE[0]}")/door.sh"
export LOGDIR="${LOGDIR:-./runs}"

echo "=== self-test"
run "$PYTHON" "$HERE/profiling_script.py" --mode=test
status=$?
[ $status -eq 0 ] || { echo "!!! FAILED: self-test"; exit $status; }
echo "=== profiling"
run "$PYTHON" "$HERE/profiling_script.py" --mode=profile "$@"
status=$?
[ $status -eq 0 ] && echo "+++ SUCCESS" || echo "!!! FAILED: see the lines above (exit $status)"
[ $status -eq 2 ] || echo "Look at the results with: tensorboard --logdir=$LOGDIR, then http://localhost:6006"
exit $status
