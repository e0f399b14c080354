# Every shell script here reads this first, with the script's arguments. It answers --help, finds Python and dpscope,
# and lets script and program end together.

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
PYTHON="${PYTHON:-$([ -x "$HERE/../.venv/bin/python" ] && echo "$HERE/../.venv/bin/python" || echo python3)}"

refuse() {  # wrong usage or set-up: a sentence, and exit code 2
  echo "Error: $*" >&2
  exit 2
}

require_some() {  # NAME VALUE…
  [ $# -gt 1 ] || refuse "$1 is empty: give it a value, or leave it out; see --help"
}

require_numbers() {  # NAME VALUE…: whole numbers above 0
  require_some "$@"
  local name="$1" value
  for value in "${@:2}"; do
    [[ "$value" =~ ^[1-9][0-9]*$ ]] || refuse "$name must be whole numbers above 0, not '$value'"
  done
}

# A signal ends the program that runs and the script with it; bash alone would wait, or go on with the next.
running=
run() {
  "$@" &
  running=$!
  wait "$running"
}
end() {
  trap - INT TERM HUP
  [ -z "$running" ] || kill -TERM "$running" 2>/dev/null
  wait
  echo "Interrupted. What was finished is in ${OUT:-the folder named above}." >&2
  exit "$1"
}
trap 'end 130' INT
trap 'end 143' TERM
trap 'end 129' HUP

for argument in "$@"; do
  case "$argument" in -h | --help) sed -n '2,/^$/ s/^# \{0,1\}//p' "$0"; exit ;; esac  # a script's first comment
done
command -v "$PYTHON" >/dev/null || refuse "there is no Python at '$PYTHON': set PYTHON=/path/to/python"
"$PYTHON" "$HERE/door.py" || exit 2
