#!/usr/bin/env bash
# docs/example-report.html and its pictures, from the results of one NVIDIA H200 that lie in benchmarks/results (one
# commit, one day). Measures nothing. Needs Chromium for the pictures. Usage: benchmarks/example_page.sh

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
DOCS="$HERE/../docs"
PYTHON="${PYTHON:-$([ -x "$HERE/../.venv/bin/python" ] && echo "$HERE/../.venv/bin/python" || echo python3)}"
RESULTS="$HERE/results/2026-11-15-h200-page/results"
WORK="$(mktemp -d)"

cp -r "$RESULTS" "$WORK/results"
"$PYTHON" -m dpscope report "$WORK" >"$WORK/log" || { cat "$WORK/log"; exit 1; }
cp "$WORK/report.html" "$DOCS/example-report.html"
"$PYTHON" "$HERE/picture_of_page.py" "$DOCS/example-report.html" "$DOCS/report.png" --width 1200 --height 640
"$PYTHON" "$HERE/picture_of_page.py" "$DOCS/example-report.html" "$DOCS/report-dark.png" --width 1200 --height 640 --dark
ls -l "$DOCS"/example-report.html "$DOCS"/report.png "$DOCS"/report-dark.png
rm -r "$WORK"
