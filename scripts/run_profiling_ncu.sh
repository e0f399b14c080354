#!/usr/bin/env bash
# Every trainer at every batch size and sequence length under Nsight Compute, each in a process of its own. One failure
# does not stop the rest. Reports: ncu_reports/report_TRAINER_bsB_seqT.ncu-rep, and a table of them at the end.
#
#   scripts/run_profiling_ncu.sh
#   TRAINERS="standard flash_clip" BATCH_SIZES=8 SEQ_LENS=1024 scripts/run_profiling_ncu.sh
#   scripts/run_profiling_ncu.sh --guide      # how to read the reports
#
# Set from outside: TRAINERS ("standard dpsgd dpsgd_ghost"), BATCH_SIZES ("8 16"), SEQ_LENS ("256 1024"), MODEL (1b),
# DTYPE (fp32), ACTIVE_STEPS (5, in each report), METRICS (more of them, as ncu or nvprof names them: a,b), LIMIT (600,
# seconds before a hanging ncu is ended), OUT (ncu_reports), PYTHON, NCU. It takes no other flags.
# Exit code: 0, or 1 if a run left no report, or 2 for wrong usage.

source "$(dirname "${BASH_SOURCE[0]}")/door.sh"
if [ "$*" = --guide ]; then
  exec "$PYTHON" "$HERE/profiling_script_ncu.py" --guide
fi
[ $# -eq 0 ] || refuse "unknown argument '$1': sizes are set as variables, as BATCH_SIZES=8 $(printf %q "$0"); see --help"

read -r -a TRAINERS <<< "${TRAINERS:-standard dpsgd dpsgd_ghost}"
read -r -a BATCH_SIZES <<< "${BATCH_SIZES:-8 16}"
read -r -a SEQ_LENS <<< "${SEQ_LENS:-256 1024}"
MODEL="${MODEL:-1b}"
DTYPE="${DTYPE:-fp32}"
ACTIVE_STEPS="${ACTIVE_STEPS:-5}"
METRICS="${METRICS:-}"
LIMIT="${LIMIT:-600}"
OUT="${OUT:-ncu_reports}"

require_some TRAINERS "${TRAINERS[@]}"
require_numbers BATCH_SIZES "${BATCH_SIZES[@]}"
require_numbers SEQ_LENS "${SEQ_LENS[@]}"
require_numbers ACTIVE_STEPS "$ACTIVE_STEPS"
require_numbers LIMIT "$LIMIT"
list() { local IFS=,; echo "$*"; }
"$PYTHON" -m dpscope ncu --print-command --methods "$(list "${TRAINERS[@]}")" --batch-size "$(list "${BATCH_SIZES[@]}")" \
  --seq-len "$(list "${SEQ_LENS[@]}")" --model "$MODEL" --dtype "$DTYPE" >/dev/null || exit 2  # can all of it be run?
"$PYTHON" -m dpscope.instruments.ncu --version || exit 2
mkdir -p "$OUT" || exit 2
total=$((${#TRAINERS[@]} * ${#BATCH_SIZES[@]} * ${#SEQ_LENS[@]}))
number=0
reports=()
failed=()
for trainer in "${TRAINERS[@]}"; do
  for batch_size in "${BATCH_SIZES[@]}"; do
    for seq_len in "${SEQ_LENS[@]}"; do
      number=$((number + 1))
      name="report_${trainer}_bs${batch_size}_seq${seq_len}"
      echo "=== [$number/$total] $trainer: batch $batch_size, sequence $seq_len"
      if run "$PYTHON" -m dpscope.instruments.ncu --metrics "$METRICS" --limit "$LIMIT" --log "$OUT/$name.log" \
          "$OUT/$name.ncu-rep" "$PYTHON" "$HERE/profiling_script_ncu.py" --mode=profile --trainer="$trainer" \
          --batch_size="$batch_size" --seq_len="$seq_len" --model="$MODEL" --dtype="$DTYPE" \
          --active_steps="$ACTIVE_STEPS"; then
        echo "+++ NCU SUCCESS: $OUT/$name.ncu-rep"
        reports+=("$OUT/$name.ncu-rep")
      else
        echo "!!! NCU FAILED: $name (what it printed: $OUT/$name.log)"
        failed+=("$name")
      fi
    done
  done
done

echo
[ ${#reports[@]} -eq 0 ] || "$PYTHON" -m dpscope ncu-read "${reports[@]}" --steps "$ACTIVE_STEPS"
echo
echo "$((total - ${#failed[@]})) of $total runs left a report in $OUT."
[ ${#failed[@]} -eq 0 ] || printf 'Failed: %s\n' "${failed[@]}"
exit $((${#failed[@]} > 0))
