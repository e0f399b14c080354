"""Flash clipping next to ordinary training at shapes that nobody chose: they are drawn from a seed.

python benchmarks/seeded_grid.py OUT --seed 7              # eight shapes on CUDA, two rows each: about four minutes
python benchmarks/seeded_grid.py OUT --seed 7 --print      # the shapes alone
"""

import argparse
import random
import statistics
from dataclasses import dataclass
from pathlib import Path

import dpscope

MOST_PARAMETERS = 1.3e9
POSITIONS = (4096, 32768)  # of a batch
FAMILIES = ("1b", "hf:gpt2", "hf:llama", "hf:bert", "hf:vit")  # presets whose sizes are drawn


@dataclass(frozen=True)
class Shape:
    family: str
    sizes: dict[str, int]
    batch_size: int
    seq_len: int | None

    def __str__(self) -> str:
        length = f" × {self.seq_len}" if self.seq_len else ""
        return (
            f"{self.family} d={self.sizes['hidden_dim']}, {self.sizes['num_layers']} layers: {self.batch_size}{length}"
        )


def draw_shape(chance: random.Random) -> Shape:
    """Widths, depths, heads, batch and sequence; drawn again until the model is small enough."""
    while True:
        family = chance.choice(FAMILIES)
        head = chance.choice((64, 128))
        width = head * chance.randint(8, 32 if head == 128 else 48)
        sizes = {"hidden_dim": width, "num_heads": width // head, "num_layers": chance.randint(6, 32)}
        positions = round(2 ** chance.uniform(*(size.bit_length() - 1 for size in POSITIONS)))
        length: int | None = 8 * round(2 ** chance.uniform(6, 13) / 8)  # 64 to 8192, rarely a power of two
        if family == "hf:llama":
            sizes |= {"kv_heads": sizes["num_heads"], "vocab_size": chance.choice((32000, 50000, 128256))}
        elif family == "hf:vit":
            length, patches = None, 197
        else:
            sizes |= {"vocab_size": chance.choice((30522, 32000, 50257)), "max_seq_len": max(512, length or 0)}
        batch = max(1, positions // (length or patches))
        weights = 12 * sizes["num_layers"] * width**2 + 2 * sizes.get("vocab_size", 1000) * width
        if weights <= MOST_PARAMETERS and batch <= 256:
            return Shape(family, sizes, batch, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--shapes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--print", action="store_true", dest="only_print", help="the shapes alone")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    shapes = [draw_shape(chance) for _ in range(arguments.shapes)]
    if arguments.only_print:
        print(*shapes, sep="\n")
        return
    lines, times, peaks = [], [], []
    for place, shape in enumerate(shapes):
        comparison = dpscope.compare(
            dpscope.make_config(shape.family, **shape.sizes),
            methods=["standard", "flash"],
            instruments=["time"],
            batch_size=shape.batch_size,
            seq_len=shape.seq_len,
            dtype="bf16",
            optimizer="adamw",
            warmup=4,
            steps=arguments.steps,
            out=arguments.out / f"{arguments.seed}-{place}",
            overwrite=True,
        )
        rows = {row.method: row for row in comparison.rows}
        standard, flash = rows["standard"], rows["flash"]
        if flash.time_ratio is None or flash.memory_ratio is None:
            lines.append(f"| {shape} | {standard.result.status} | {flash.result.status} | | |")
            continue
        times.append(flash.time_ratio)
        peaks.append(flash.memory_ratio)
        spreads = [
            f"{row.median_ms:.1f} ms ({row.spread_ms[0]:.1f}–{row.spread_ms[1]:.1f})" for row in (standard, flash)
        ]
        lines.append(f"| {shape} | {spreads[0]} | {spreads[1]} | {times[-1]:.2f} | {peaks[-1]:.2f} |")
        print(lines[-1], flush=True)
    print(f"\nSeed {arguments.seed}. Medians of {arguments.steps} steps, 10th to 90th percentile.\n")
    print("| shape | standard | flash | time × | peak × |\n| --- | --- | --- | --- | --- |")
    print(*lines, sep="\n")
    if times:
        print(
            f"\ntime ×: median {statistics.median(times):.2f}, worst {max(times):.2f}; peak ×: worst {max(peaks):.2f}"
        )


if __name__ == "__main__":
    main()
