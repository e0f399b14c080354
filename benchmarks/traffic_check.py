"""Do the counters count? Operations whose bytes and operations are known beforehand, under Nsight Compute.

python benchmarks/traffic_check.py --out FOLDER     on a GPU with ncu; half a minute

Each operation is one range. Tensors are many times larger than L2, so that what stays in the cache is a few per cent,
and no operand has to be read twice. Exits with 1 if a figure is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dpscope.instruments.ncu.metrics import PASSES, RANGE_METRICS, summarise_range
from dpscope.instruments.ncu.reading import read_report
from dpscope.instruments.ncu.running import find_ncu, one_pass_metrics, range_command, take_report
from dpscope.units import GIB, MIB

TOLERANCE = 0.10
COPIED = 4 * GIB
ROWS, SIDE, SQUARE = 2**22, 256, 8192

# Operation -> figure -> what it must be. The square product reads its operands more than once: only its operations
# are known.
EXPECTED: dict[str, dict[str, int]] = {
    "4 GiB of floats times 2": {"dram_read_bytes": COPIED, "dram_write_bytes": COPIED, "l2_to_sm_bytes": COPIED},
    f"bf16 product {ROWS}×{SIDE} by {SIDE}×{SIDE}": {
        "dram_read_bytes": 2 * (ROWS * SIDE + SIDE * SIDE),
        "dram_write_bytes": 2 * ROWS * SIDE,
        "tensor": 2 * ROWS * SIDE * SIDE,
    },
    f"bf16 product {SQUARE}×{SQUARE} by {SQUARE}×{SQUARE}": {"tensor": 2 * SQUARE**3},
    # Last, since no kernel of torch's does it: a range without kernels may be left out of the report.
    "copy of 4 GiB": {"dram_read_bytes": COPIED, "dram_write_bytes": COPIED},
}


def run_operations() -> None:
    """What ncu looks at: each operation once outside a range and once inside, in the order of EXPECTED."""
    import torch

    floats = torch.ones(COPIED // 4, device="cuda")
    target = torch.empty_like(floats)
    tall = torch.randn(ROWS, SIDE, device="cuda", dtype=torch.bfloat16)
    small = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(tall)
    square = torch.randn(SQUARE, SQUARE, device="cuda", dtype=torch.bfloat16)
    operations = (
        lambda: torch.mul(floats, 2.0, out=target),
        lambda: torch.mm(tall, small, out=product),
        lambda: torch.mm(square, square),
        lambda: target.copy_(floats),
    )
    for operation in operations:
        operation()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        operation()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dpscope-results/traffic-check"))
    parser.add_argument("--run-operations", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run_operations:
        run_operations()
        return 0
    ncu = find_ncu()
    if ncu is None:
        print("no ncu here: `dpscope doctor` says more", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    report = args.out / "operations.ncu-rep"
    program = [sys.executable, __file__, "--run-operations"]
    taken = take_report(lambda names: range_command(ncu, program, report, names), RANGE_METRICS, report, limit=300)
    (args.out / "ncu.log").write_text(taken.output)
    if taken.failure:
        print(f"{taken.failure}\n{taken.output[-2000:]}", file=sys.stderr)
        return 1
    actions = read_report(report, ncu=ncu)
    passes = actions[0].metrics.get(PASSES, 0)
    print(f"{len(actions)} ranges in {passes:.0f} passes; refused: {taken.refused or 'nothing'}")
    print(f"{'operation':44} {'figure':18} {'expected':>14} {'counted':>14} {'off by':>8}")
    worst = 0.0
    for (operation, expected), action in zip(EXPECTED.items(), actions, strict=False):
        seen = summarise_range(action.metrics)
        counted = {**seen["traffic"], **seen["flops"]}
        for figure, want in expected.items():
            got = counted.get(figure, 0)
            worst = max(worst, abs(got / want - 1))
            print(
                f"{operation:44} {figure:18} {_show(figure, want):>14} {_show(figure, got):>14} {got / want - 1:+8.2%}"
            )
        rest = {name: value for name, value in counted.items() if name not in expected}
        print("  " + ", ".join(f"{name} {_show(name, value)}" for name, value in rest.items()))
    print(f"Counted of a kernel in one pass: {', '.join(one_pass_metrics(ncu))}")
    print(f"{'AGREES' if worst <= TOLERANCE else 'DISAGREES'}: off by {worst:.2%} at most, {TOLERANCE:.0%} allowed")
    return int(worst > TOLERANCE)


def _show(figure: str, value: float) -> str:
    return f"{value / MIB:.1f} MiB" if figure.endswith("_bytes") else f"{value / 1e9:.1f} G"


if __name__ == "__main__":
    sys.exit(main())
