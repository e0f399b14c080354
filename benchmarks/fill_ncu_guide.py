"""Write the measured table of a `dpscope ncu --out FOLDER` into docs/ncu-guide.md, between its two markers.

python benchmarks/fill_ncu_guide.py FOLDER --date 2026-11-15 --command "dpscope ncu --model 1b …"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dpscope.reports.report import compare_results
from dpscope.reports.traffic.data import Traffic, by_size
from dpscope.reports.traffic.text import traffic_verdict
from dpscope.results.payloads.ncu import READ, WRITE
from dpscope.results.schema import Result
from dpscope.results.store import ResultStore, write_atomically
from dpscope.units import MISSING, format_ms, format_rate, format_ratio, format_traffic
from dpscope.vocabulary.methods import methods

GUIDE = Path(__file__).parents[1] / "docs" / "ncu-guide.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
HEADINGS = (
    *("method", "batch", "sequence", "DRAM read", "DRAM written", "× standard", "per token", "FLOP/byte", "L2 to SM"),
    *("step time", "bandwidth", "of peak"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--date", required=True, help="when it was measured")
    parser.add_argument("--command", required=True, help="what was typed to measure it")
    parser.add_argument("--guide", type=Path, default=GUIDE)
    args = parser.parse_args()
    results = sorted(ResultStore(args.folder).read_all()[0].values(), key=_order)
    sizes = by_size(compare_results(results))
    if not sizes or any(traffic.estimated for size in sizes for traffic in size):
        sys.exit(f"{args.folder} holds no traffic, or an estimate among it: the guide shows measurements only")
    write_atomically(args.guide, fill(args.guide.read_text(encoding="utf-8"), sizes, args.date, args.command))
    print(f"Written: {args.guide}")


def fill(guide: str, sizes: Sequence[Sequence[Traffic]], date: str, command: str) -> str:
    """The guide with a new measured part; the rest stays as it is."""
    before, _, rest = guide.partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        raise SystemExit(f"the guide has no {BEGIN} … {END}")
    return f"{before}{BEGIN}\n{measured_part(sizes, date, command)}\n{END}{after}"


def measured_part(sizes: Sequence[Sequence[Traffic]], date: str, command: str) -> str:
    traffics = [traffic for size in sizes for traffic in size]
    result = traffics[0].row.measured["ncu"]
    environment = result.environment
    where = (
        f"Model `{result.spec['workload']['name']}`, {result.spec['dtype']}, {result.spec['optimizer']}, on one "
        f"{environment.get('gpu')} (torch {environment.get('torch')}, Opacus {environment.get('opacus')}, "
        f"ncu {traffics[0].data.get('ncu_version')}, {date}), by `{command}`:"
    )
    lines = [HEADINGS, ["---"] * len(HEADINGS), *map(_cells, traffics)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([where, table, *traffic_verdict(sizes)])


def _cells(traffic: Traffic) -> list[str]:
    spec = traffic.row.first.spec
    fraction, intensity = traffic.bandwidth_fraction, traffic.intensity
    return [
        f"`{traffic.row.method}`",
        str(spec["batch_size"]),
        str(spec.get("seq_len") or MISSING),
        *(format_traffic(traffic.figure(name)) for name in (READ, WRITE)),
        format_ratio(traffic.ratio),
        format_traffic(traffic.bytes_per_item),
        MISSING if intensity is None else f"{intensity:.0f}",
        format_traffic(traffic.figure("l2_to_sm_bytes")),
        format_ms(traffic.row.median_ms),
        format_rate(traffic.bandwidth),
        MISSING if fraction is None else f"{100 * fraction:.0f} %",
    ]


def _order(result: Result) -> tuple[object, ...]:
    names = list(methods())
    place = names.index(result.experiment) if result.experiment in names else len(names)
    return (result.spec["batch_size"], result.spec.get("seq_len") or 0, place)


if __name__ == "__main__":
    main()
