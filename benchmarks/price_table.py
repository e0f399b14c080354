"""Flash clipping next to ordinary training at every size that is promised something: time and peak memory of each.

python benchmarks/price_table.py OUT                 # all rows, two processes each: about seven minutes on an H200
python benchmarks/price_table.py OUT --only vit lora # those whose names hold one of the words, or are one
python benchmarks/price_table.py OUT --print         # the table of what OUT holds
python benchmarks/price_table.py OUT --by-hand       # the loop of hand_written_loop.py, all rows in this process

Each row is a `dpscope compare` of its own in OUT/NAME, with its result files; rows that are there are kept. By hand a
row is OUT/NAME.json. Its standard deviates from that of another process by a few percent: ratios are within one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import hand_written_loop

from dpscope.results.store import ResultStore
from dpscope.units import format_bytes

WIDE = ["--hidden-dim", "4096", "--num-layers", "6", "--num-heads", "32"]
DEEP = ["--hidden-dim", "1024", "--num-layers", "24"]
LORA = ["--lora", "r=16,alpha=32,target=q_proj,k_proj,v_proj,o_proj"]
CHECKPOINTED = ["--checkpoint-blocks"]
LEAN = [*CHECKPOINTED, "--memory-budget", "lean"]
COMPILED = ("--compile", "default")


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
    Price("8x1024-compiled", "1b", 8, 1024, 1.10, 1.03, more=COMPILED),
    Price("4x2048-compiled", "1b", 4, 2048, 1.08, 1.03, more=COMPILED),
    Price("16x256-compiled", "1b", 16, 256, 1.08, 1.03, more=COMPILED),
    Price("8x256-compiled-graphs", "1b", 8, 256, 1.10, 1.03, more=("--compile", "reduce-overhead")),
    Price("gpt2-16x1024-compiled", "hf:gpt2", 16, 1024, 1.10, 1.03, more=COMPILED),
    Price("llama-4x2048-compiled", "hf:llama", 4, 2048, 1.10, 1.03, more=COMPILED),
]


def options_of(price: Price, steps: int) -> list[str]:
    options = ["--model", price.model, "--batch-size", str(price.batch), "--dtype", price.dtype, *price.more]
    options += [] if price.length is None else ["--seq-len", str(price.length)]
    return [*options, "--warmup", "3", "--steps", str(steps)]


def measure(price: Price, out: Path, steps: int) -> str:
    command = [sys.executable, "-m", "dpscope", "compare", "--methods", "standard,flash", "--instruments", "time"]
    command += [*options_of(price, steps), "--timeout", "120", "--out", str(out / price.name), "--resume"]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return read(price, out)


def read(price: Price, out: Path) -> str:
    """The row of what is in OUT/NAME."""
    found, _ = ResultStore(out / price.name).read_all()
    rows = {result.experiment: result for result in found.values()}
    standard, flash = rows.get("standard"), rows.get("flash")
    if standard is None or flash is None or not (standard.ok and flash.ok):
        ends = {name: row.status if row else "not measured" for name, row in (("standard", standard), ("flash", flash))}
        return f"| {price.name} | {ends['standard']} | | {ends['flash']} | | |"
    figures = []
    for row in (standard, flash):
        assert row.timing and row.memory
        spread = row.timing["p10_ms"], row.timing["p90_ms"]
        figures.append((row.timing["median_ms"], spread, row.memory["peak_allocated_bytes"]))
    return line(price, *figures)


def measure_by_hand(price: Price, out: Path, steps: int) -> str:
    given = hand_written_loop.parser().parse_args(options_of(price, steps))
    records: list[dict[str, Any]] = hand_written_loop.measure_shape(given, tell=lambda _: None)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{price.name}.json").write_text(json.dumps(records, indent=1))
    return line(price, *((r["median_ms"], (r["least_ms"], r["most_ms"]), r["peak"]) for r in records))


Figures = tuple[float, tuple[float, float], int]  # median in ms, its spread, peak in bytes


def line(price: Price, standard: Figures, flash: Figures) -> str:
    """The row in Markdown: a figure that is above its bar has an exclamation mark."""
    base, (least, most), peak = standard
    times, peaks = flash[0] / base, flash[2] / peak
    above = "!" if times > price.time + 0.005 else ""
    higher = "!" if price.peak is not None and peaks > price.peak + 0.005 else ""
    bar = f"≤ {price.time:.2f}, " + ("reported" if price.peak is None else f"≤ {price.peak:.2f}")
    return (
        f"| {price.name} | {base:.1f} ms ({least:.1f}–{most:.1f}) | {format_bytes(peak)} "
        f"| {times:.2f}×{above} | {peaks:.2f}×{higher} | {bar} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    parser.add_argument("--steps", type=int, default=10)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--print", action="store_true")
    way.add_argument("--by-hand", action="store_true")
    given = parser.parse_args()
    names = {price.name for price in PRICES}
    chosen = [
        price for price in PRICES if any(w == price.name or (w in price.name and w not in names) for w in given.only)
    ]
    print(
        "| row | standard: ms (spread) | peak | flash: time × | peak × | bar |\n| --- | --- | --- | --- | --- | --- |"
    )
    for price in chosen:
        row = measure_by_hand if given.by_hand else measure
        print(read(price, given.out) if given.print else row(price, given.out, given.steps), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
