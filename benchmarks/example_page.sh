#!/usr/bin/env bash
# docs/example-report.html and its pictures, from results of `dpscope compare` that lie in a folder (one commit, one
# day). Measures nothing. Needs Chromium for the pictures. Usage: benchmarks/example_page.sh [FOLDER]

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
DOCS="$HERE/../docs"
PYTHON="${PYTHON:-$([ -x "$HERE/../.venv/bin/python" ] && echo "$HERE/../.venv/bin/python" || echo python3)}"
RESULTS="${1:-$HERE/results/2026-11-17-h200-page}/results"
WORK="$(mktemp -d)"

cp -r "$RESULTS" "$WORK/results"
"$PYTHON" -m dpscope report "$WORK" >"$WORK/log" || { cat "$WORK/log"; exit 1; }
cp "$WORK/report.html" "$DOCS/example-report.html"
picture() { "$PYTHON" "$HERE/picture_of_page.py" "$DOCS/example-report.html" "$@" --width 1200; }
picture "$DOCS/report.png" --height 640
picture "$DOCS/report-dark.png" --height 640 --dark
picture "$DOCS/site/static/social.png" --height 630
ls -l "$DOCS"/example-report.html "$DOCS"/report.png "$DOCS"/report-dark.png "$DOCS"/site/static/social.png
rm -r "$WORK"
