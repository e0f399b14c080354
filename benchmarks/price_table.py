"""Flash clipping next to ordinary training at every size that is promised something: time and peak memory of each.

python benchmarks/price_table.py OUT                 # all rows, two processes each: about seven minutes on an H200
python benchmarks/price_table.py OUT --only vit lora # those whose names hold one of the words
python benchmarks/price_table.py OUT --print         # the table of what OUT holds

Each row is a `dpscope compare` of its own in OUT/NAME, with its result files; rows that are there are kept.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from dpscope.results.store import ResultStore
from dpscope.units import format_bytes

WIDE = ["--hidden-dim", "4096", "--num-layers", "6", "--num-heads", "32"]
DEEP = ["--hidden-dim", "1024", "--num-layers", "24"]
LORA = ["--lora", "r=16,alpha=32,target=q_proj,k_proj,v_proj,o_proj"]
CHECKPOINTED = ["--checkpoint-blocks"]
LEAN = [*CHECKPOINTED, "--memory-budget", "lean"]


class Price(NamedTuple):
    """A row: its model and size, what it may cost in time and in memory (None: reported only), and more options."""

    name: str
    model: str
    batch: int
    length: int | None
    time: float
    peak: float | None = 1.0
    dtype: str = "bf16"
    more: tuple[str, ...] = ()


PRICES = [
    Price("1x16384", "1b", 1, 16384, 1.05),
    Price("2x8192", "1b", 2, 8192, 1.05),
    Price("2x4096", "1b", 2, 4096, 1.05),
    Price("4x2048", "1b", 4, 2048, 1.05),
    Price("24x384", "1b", 24, 384, 1.05),
    Price("16x256", "1b", 16, 256, 1.05),
    Price("32x256", "1b", 32, 256, 1.05),
    Price("8x1024-d4096", "1b", 8, 1024, 1.05, more=tuple(WIDE)),
    Price("8x1024", "1b", 8, 1024, 1.06),
    Price("16x1024", "1b", 16, 1024, 1.06),
    Price("8x256-fp32", "1b", 8, 256, 1.06, dtype="fp32"),
    Price("8x1024-fp32", "1b", 8, 1024, 1.10, dtype="fp32"),
    Price("8x1024-tf32", "1b", 8, 1024, 1.15, dtype="tf32"),
    Price("8x256", "1b", 8, 256, 1.10),
    Price("64x64", "1b", 64, 64, 1.10),
    Price("16x512-d1024-24layers", "1b", 16, 512, 1.10, more=tuple(DEEP)),
    Price("gpt2-16x1024", "hf:gpt2", 16, 1024, 1.06),
    Price("llama-4x2048", "hf:llama", 4, 2048, 1.06),
    Price("llama-8b-lora-4x1024", "hf:llama-8b", 4, 1024, 1.06, more=(*LORA, "--param-dtype", "bf16")),
    Price("vit-64", "hf:vit", 64, None, 1.10),
    Price("llama-lora-8x2048", "hf:llama", 8, 2048, 1.10, more=tuple(LORA)),
    Price("8x1024-checkpointed", "1b", 8, 1024, 1.15, None, more=tuple(CHECKPOINTED)),
    Price("32x1024-checkpointed", "1b", 32, 1024, 1.15, None, more=tuple(CHECKPOINTED)),
    Price("8x1024-checkpointed-lean", "1b", 8, 1024, 1.60, 1.05, more=tuple(LEAN)),
    Price("32x1024-checkpointed-lean", "1b", 32, 1024, 1.60, 1.05, more=tuple(LEAN)),
]


def measure(price: Price, out: Path, steps: int) -> None:
    command = [sys.executable, "-m", "dpscope", "compare", "--methods", "standard,flash", "--instruments", "time"]
    command += ["--model", price.model, "--batch-size", str(price.batch), "--dtype", price.dtype, *price.more]
    command += [] if price.length is None else ["--seq-len", str(price.length)]
    command += ["--warmup", "3", "--steps", str(steps), "--timeout", "120", "--out", str(out / price.name), "--resume"]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def line(price: Price, folder: Path) -> str:
    """The row in Markdown: a figure that is above its bar has an exclamation mark."""
    found, _ = ResultStore(folder).read_all()
    rows = {result.experiment: result for result in found.values()}
    standard, flash = rows.get("standard"), rows.get("flash")
    if standard is None or flash is None or not (standard.ok and flash.ok):
        ends = {name: row.status if row else "not measured" for name, row in (("standard", standard), ("flash", flash))}
        return f"| {price.name} | {ends['standard']} | | {ends['flash']} | | |"
    assert standard.timing and flash.timing and standard.memory and flash.memory
    base, peak = standard.timing["median_ms"], standard.memory["peak_allocated_bytes"]
    times = flash.timing["median_ms"] / base
    peaks = flash.memory["peak_allocated_bytes"] / peak
    spread = f"{standard.timing['p10_ms']:.1f}–{standard.timing['p90_ms']:.1f}"
    above = "!" if times > price.time + 0.005 else ""
    higher = "!" if price.peak is not None and peaks > price.peak + 0.005 else ""
    bar = f"≤ {price.time:.2f}, " + ("reported" if price.peak is None else f"≤ {price.peak:.2f}")
    return (
        f"| {price.name} | {base:.1f} ms ({spread}) | {format_bytes(peak)} "
        f"| {times:.2f}×{above} | {peaks:.2f}×{higher} | {bar} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--print", action="store_true")
    given = parser.parse_args()
    chosen = [price for price in PRICES if any(word in price.name for word in given.only)]
    print(
        "| row | standard: ms (p10–p90) | peak | flash: time × | peak × | bar |\n| --- | --- | --- | --- | --- | --- |"
    )
    for price in chosen:
        if not given.print:
            measure(price, given.out, given.steps)
        print(line(price, given.out / price.name), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
