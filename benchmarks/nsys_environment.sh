# For scripts that use nsys: sets PYTHON, NSYS and LD_LIBRARY_PATH. To be sourced, with HERE the folder of benchmarks.
PYTHON="${PYTHON:-$([ -x "$HERE/../.venv/bin/python" ] && echo "$HERE/../.venv/bin/python" || echo python3)}"
export PYTHONPATH="$(cd "$HERE/../src" && pwd)${PYTHONPATH:+:$PYTHONPATH}"
if [ -z "${NSYS:-}" ] && ! command -v nsys >/dev/null; then
  NSYS="$(find / -xdev -path '*target-linux-x64/nsys' -type f 2>/dev/null | sort | tail -n 1)"
fi
[ -n "${NSYS:-}" ] && export NSYS && echo "nsys: $NSYS" || unset NSYS
if [ -n "${NSYS_LIBS:-}" ]; then
  export LD_LIBRARY_PATH="$(cd "$NSYS_LIBS" && pwd)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
