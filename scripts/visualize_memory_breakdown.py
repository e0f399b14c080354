#!/usr/bin/env python3
"""Figures and summary.txt from memory experiments that have run.

python scripts/visualize_memory_breakdown.py --input-dir memory_profiling_results/run_20241110_123456
"""

import argparse
import sys
from pathlib import Path

from door import ends_in_a_sentence

from dpscope.commands.report import parse_formats
from dpscope.commands.sweeping import files_written
from dpscope.comparison import Comparison
from dpscope.packages import REPORTING, require
from dpscope.reports.outputs import FIGURES, write_reports


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", type=Path, required=True, help="result JSONs, or the --out folder of a sweep")
    parser.add_argument("--output-dir", type=Path, help="where to write [default: INPUT_DIR/visualizations]")
    parser.add_argument("--format", default="png", help="of the figures, as png,svg,pdf [default: png]")
    args = parser.parse_args()
    require(*REPORTING)
    formats = parse_formats(args.format)
    comparison = Comparison.read(args.input_dir)
    folder = args.output_dir or args.input_dir / "visualizations"
    written = write_reports(comparison.report, folder, formats=formats)
    print(comparison)
    print(files_written(written))
    for figure in FIGURES:
        if not any(figure.has_name(path.name) for path in written):
            print(f"No {figure.name}: no result has what it shows")
    return 0


if __name__ == "__main__":
    with ends_in_a_sentence():
        sys.exit(main())
