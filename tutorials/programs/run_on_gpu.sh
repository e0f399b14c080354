#!/usr/bin/env bash
# Runs every command of gpu_commands.txt on this machine and keeps what it printed. About five minutes on an H200, half of it Nsight Compute.
#   tutorials/programs/run_on_gpu.sh OUT            to be kept as benchmarks/results/DATE-h200-tutorials
#   tutorials/programs/run_on_gpu.sh OUT '^nsys'    only commands whose name matches; adds to what is there
# OUT/commands.tsv says how each ended; OUT/output/NAME.txt is what it printed; OUT/recorded/ what the tutorials draw from.
# NSYS: the nsys to use (else searched for, also inside Nsight Compute). NSYS_LIBS: a folder with libraries that its importer
# lacks. One failure does not stop the rest. Reports of nsys hold the environment, so only stripped exports are kept.

OUT="${1:?say where to: run_on_gpu.sh OUT}"
ONLY="${2:-.}"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")/../../benchmarks" && pwd)"
# The commands run in another folder: make the places of modules absolute.
[ -n "${PYTHONPATH:-}" ] && export PYTHONPATH="$(IFS=:; for place in $PYTHONPATH; do realpath -m "$place"; done | paste -sd:)"
. "$HERE/nsys_environment.sh"
ROOT="$(cd "$HERE/.." && pwd)"
mkdir -p "$OUT/output" "$OUT/recorded"
OUT="$(cd "$OUT" && pwd)"
WORK="$(mktemp -d)"
ln -s "$ROOT/tutorials/programs" "$WORK/programs"
ln -s "$OUT/recorded" "$WORK/recorded"

# `python`, `dpscope` and `nsys` as the tutorials call them, whatever they are called here.
mkdir "$WORK/bin"
printf '#!/bin/sh\nexec "%s" "$@"\n' "$(command -v "$PYTHON")" >"$WORK/bin/python"
printf '#!/bin/sh\nexec "%s" -m dpscope "$@"\n' "$(command -v "$PYTHON")" >"$WORK/bin/dpscope"
for tool in nvcc ncu; do  # often installed, and not on the PATH
  command -v "$tool" >/dev/null || { found="$(ls -d /usr/local/cuda*/bin/$tool /opt/nvidia/nsight-compute/*/$tool 2>/dev/null | tail -n 1)" && [ -n "$found" ] && ln -s "$found" "$WORK/bin/$tool"; }
done
# nsys writes down the whole environment: give it little. Where it leaves a raw capture, its importer makes the report.
cat >"$WORK/bin/nsys" <<WRAPPER
#!/usr/bin/env bash
env -i PATH="\$PATH" HOME="\$HOME" PYTHONPATH="\$PYTHONPATH" LD_LIBRARY_PATH="\${LD_LIBRARY_PATH:-}" "${NSYS:-/usr/bin/nsys}" "\$@" \
  2>&1 | tee "$WORK/nsys.log"
status=\${PIPESTATUS[0]}
name="\$(printf '%s\n' "\$@" | sed -n 's/^--output=//p')"
raw="\$name.qdstrm"
[ -e "\$raw" ] || raw="\$(sed -n "s/.*Generating '\(.*\.qdstrm\)'.*/\1/p" "$WORK/nsys.log" | tail -n 1)"
if [ -n "\$name" ] && [ ! -e "\$name.nsys-rep" ] && [ -n "\$raw" ] && [ -e "\$raw" ]; then
  importer="\$("$PYTHON" -c 'import sys; from dpscope.instruments.nsys.command import find_importer; print(find_importer(sys.argv[1]) or "")' "${NSYS:-nsys}")"
  echo "importing the raw capture with QdstrmImporter"
  [ -n "\$importer" ] && "\$importer" -i "\$raw" -o "\$name.nsys-rep" 2>&1 | tail -n 3
  [ -e "\$name.nsys-rep" ]
  status=\$?
fi
exit \$status
WRAPPER
chmod +x "$WORK"/bin/*
export PATH="$WORK/bin:$PATH"
cd "$WORK" || exit 2

tidy() {  # without this machine's folders and colours
  sed -e "s#$WORK/##g; s#$WORK#.#g; s#$ROOT/##g; s#$ROOT#.#g; s#$HOME/##g" -e 's/\x1b\[[0-9;]*m//g' | cut -c1-400
}

keep() {  # what the tutorials draw from, as soon as it is there: the run may be cut short
  for database in "$WORK"/*.sqlite; do
    kept="$OUT/recorded/$(basename "$database")"
    [ -e "$database" ] && [ ! -e "$kept" ] && "$PYTHON" -m dpscope.instruments.nsys.stripping "$database" "$kept"
  done
}

[ -e "$OUT/commands.tsv" ] || printf 'exit\tseconds\tname\tcommand\n' >"$OUT/commands.tsv"
while IFS= read -r line; do
  case "$line" in '#'* | '') continue ;; esac
  mark=''
  case "$line" in '& '* | '! '*) mark="${line%% *}" line="${line#* }" ;; esac
  name="${line%%: *}" command="${line#*: }"
  printf '%s' "$name" | grep -Eq "$ONLY" || continue
  began=$(date +%s.%N)
  if [ "$mark" = '&' ]; then
    timeout 60 bash -c "$command" >"$WORK/$name.out" 2>&1 </dev/null &
    background=$! behind="$name"
    status=started
  else
    timeout 180 bash -c "$command" >"$WORK/$name.out" 2>&1 </dev/null
    status=$?
    head -c 60000 "$WORK/$name.out" | tidy >"$OUT/output/$name.txt"
  fi
  seconds=$("$PYTHON" -c "import time; print(f'{time.time() - $began:.1f}')")
  printf '%s\t%s\t%s\t%s\n' "$status" "$seconds" "$name" "$command" >>"$OUT/commands.tsv"
  echo "$name: exit $status, $seconds s"
  case "$name" in nsys-read* | nsys-stats) keep ;; esac
done <"$ROOT/tutorials/programs/gpu_commands.txt"
if [ -n "${background:-}" ]; then
  wait "$background"
  echo "$behind ended with $?"
  tidy <"$WORK/$behind.out" >"$OUT/output/$behind.txt"
fi

keep
# Traces name the file they were written to, and the host.
for trace in $(find "$OUT/recorded" -name '*.json.gz'); do
  gunzip -c "$trace" | sed -E 's#("traceName": ")[^"]*#\1trace.json#; s#("hostname"|"host_name"): "[^"]*"#\1: "host"#' | gzip -9n >"$trace.tidy" && mv "$trace.tidy" "$trace"
done
cp "$WORK/live.csv" "$OUT/recorded/" 2>/dev/null
rm -rf "$WORK"
echo
awk -F '\t' 'NR > 1 && $1 != 0 && $1 != "started" {print "not 0:", $3, "(" $1 ")"}' "$OUT/commands.tsv"
du -sh "$OUT" | cut -f 1
