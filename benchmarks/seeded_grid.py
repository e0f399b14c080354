"""Flash clipping next to ordinary training at shapes that nobody chose: they are drawn from a seed.

python benchmarks/seeded_grid.py OUT --seed 7            # eight shapes on CUDA, two rows each: three to four minutes
python benchmarks/seeded_grid.py OUT --seed 7 --print    # the shapes alone
python benchmarks/seeded_grid.py OUT --seed 7 --small    # shapes for a CPU, to see that it works

Every row's result file is in OUT, and all figures of the table are in OUT/seed-7.json. A shape at which ordinary
training runs out of memory, or a model that cannot be built, is drawn again, which is said below the table. Exit
code 1: flash clipping has no figures at some shape.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dpscope
from dpscope.errors import UserError
from dpscope.reports.export import to_records
from dpscope.reports.tables import marked
from dpscope.vocabulary.statuses import OK

MOST_DRAWS = 4  # for each shape that is wanted
# Of each method, by their names in `results.csv`.
FIGURES = ("status", "reason", "time_median_ms", "time_p10_ms", "time_p90_ms")
FIGURES += ("samples_per_second", "peak_memory_bytes")


@dataclass(frozen=True)
class Shape:
    family: str
    sizes: dict[str, int]
    batch_size: int
    seq_len: int | None

    def __str__(self) -> str:
        length = f" × {self.seq_len}" if self.seq_len else ""
        width, layers, heads = (self.sizes[name] for name in ("hidden_dim", "num_layers", "num_heads"))
        return f"{self.family}, d={width}, {layers} layers, {heads} heads: {self.batch_size}{length}"


@dataclass(frozen=True)
class Range:
    """What shapes are drawn from; pairs are the least and the most."""

    families: tuple[str, ...]  # presets whose sizes are drawn
    head_widths: tuple[int, ...]
    widths: tuple[int, int]
    layers: tuple[int, int]
    positions: tuple[int, int]  # of a batch
    lengths: tuple[int, int]
    vocabularies: tuple[int, ...]
    image_positions: int  # of an image of the family hf:vit
    most_parameters: float
    most_operations: float  # of a step: six for each parameter at each position


LARGE = Range(
    families=("1b", "hf:gpt2", "hf:llama", "hf:bert", "hf:vit"),
    head_widths=(64, 128),
    widths=(512, 4096),
    layers=(6, 32),
    positions=(4096, 32768),
    lengths=(64, 8192),
    vocabularies=(30522, 32000, 50257, 128256),
    image_positions=197,
    most_parameters=1.3e9,
    most_operations=1.2e14,  # a third of a second on an H200
)
SMALL = Range(
    families=("tiny", "hf:gpt2-tiny", "hf:llama-tiny", "hf:bert-tiny", "hf:vit-tiny"),
    head_widths=(8, 16),
    widths=(16, 64),
    layers=(1, 3),
    positions=(32, 128),
    lengths=(8, 64),
    vocabularies=(100, 300),
    image_positions=17,
    most_parameters=1e6,
    most_operations=1e9,
)


def draw_shape(chance: random.Random, within: Range) -> Shape:
    """Widths, depths, heads, batch and sequence; drawn again until a step is small enough."""
    family = chance.choice(within.families)
    while True:
        head = chance.choice(within.head_widths)
        width = head * chance.randint(*(size // head for size in within.widths))
        sizes = {"hidden_dim": width, "num_heads": width // head, "num_layers": chance.randint(*within.layers)}
        positions = _draw_log(chance, within.positions)
        length: int | None = 8 * max(1, round(_draw_log(chance, within.lengths) / 8))  # rarely a power of two
        vocabulary = chance.choice(within.vocabularies)
        if family.startswith("hf:vit"):
            length, vocabulary = None, 1000
        else:
            sizes["vocab_size"] = vocabulary
            shared = chance.choice([heads for heads in range(1, width // head + 1) if width // head % heads == 0])
            sizes |= {"kv_heads": shared} if "llama" in family else {"max_seq_len": max(512, length or 0)}
        batch = max(1, positions // (length or within.image_positions))
        parameters = 12 * sizes["num_layers"] * width**2 + 2 * vocabulary * width
        operations = 6 * parameters * batch * (length or within.image_positions)
        if parameters <= within.most_parameters and operations <= within.most_operations and batch <= 256:
            return Shape(family, sizes, batch, length)


def _draw_log(chance: random.Random, bounds: tuple[int, int]) -> int:
    """Uniform on a logarithmic scale."""
    least, most = bounds
    return round(least * (most / least) ** chance.random())


def measure(shape: Shape, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of standard and flash at a shape."""
    comparison = dpscope.compare(
        dpscope.make_config(shape.family, **shape.sizes),
        methods=["standard", "flash"],
        instruments=["time"],
        batch_size=shape.batch_size,
        seq_len=shape.seq_len,
        dtype=arguments.dtype,
        warmup=arguments.warmup,
        steps=arguments.steps,
        device="cpu" if arguments.small else "auto",
        out=folder,
        overwrite=True,
    )
    rows = {record["method"]: record for record in to_records(comparison.rows)}
    figures = {f"{method}_{name}": row[name] for method, row in rows.items() for name in FIGURES}
    ratios = {name: rows["flash"][name] for name in ("time_ratio", "memory_ratio", "time_ratio_doubt")}
    return {"shape": str(shape), **asdict(shape), **figures, **ratios}


def line_of(record: dict[str, Any]) -> str:
    if record["time_ratio"] is None:
        return f"| {record['shape']} | {_timed(record, 'standard')} | {record['flash_status']} | | |"
    ratio = marked(f"{record['time_ratio']:.2f}", record["time_ratio_doubt"] or "")
    memory = "" if record["memory_ratio"] is None else f"{record['memory_ratio']:.2f}"
    return f"| {record['shape']} | {_timed(record, 'standard')} | {_timed(record, 'flash')} | {ratio} | {memory} |"


def _timed(record: dict[str, Any], method: str) -> str:
    median, low, high = (record[f"{method}_time_{name}_ms"] for name in ("median", "p10", "p90"))
    return f"{median:.1f} ms ({low:.1f}–{high:.1f}), {record[f'{method}_samples_per_second']:,.0f} samples/s"


def summarise(records: list[dict[str, Any]]) -> list[str]:
    lines = []
    for name, what in (("time_ratio", "time ×"), ("memory_ratio", "peak ×")):
        found = [record[name] for record in records if record[name] is not None]
        if found:
            lines.append(f"{what}: median {statistics.median(found):.2f}, worst {max(found):.2f}")
    spreads = [record["standard_time_p90_ms"] / record["standard_time_p10_ms"] - 1 for record in records]
    if spreads:
        median, worst = statistics.median(spreads), max(spreads)
        lines.append(f"p10 to p90 of standard: median {median:.1%}, worst {worst:.1%} of the time")
    return lines


def measure_shapes(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """A record for each of the wanted shapes, and what was drawn again."""
    chance = random.Random(arguments.seed)
    records: list[dict[str, Any]] = []
    again: list[str] = []
    while len(records) < arguments.shapes and len(records) + len(again) < MOST_DRAWS * arguments.shapes:
        shape = draw_shape(chance, arguments.range)
        place = len(records) + len(again)
        try:
            record = measure(shape, arguments.out / f"{arguments.seed}-{place}", arguments)
        except UserError as error:
            again.append(f"{shape}: {error}")
            continue
        if record["standard_status"] != OK:
            again.append(f"{shape}: standard: {record['standard_reason']}")
            continue
        records.append(record)
        print(line_of(record), flush=True)
    return records, again


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--shapes", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", help="[default: bf16; fp32 with --small]")
    parser.add_argument("--small", action="store_true", help="shapes for a CPU, and on it")
    parser.add_argument("--print", action="store_true", dest="only_print", help="the shapes alone")
    given = parser.parse_args(arguments)
    given.range = SMALL if given.small else LARGE
    given.dtype = given.dtype or ("fp32" if given.small else "bf16")
    if given.only_print:
        chance = random.Random(given.seed)
        print(*(draw_shape(chance, given.range) for _ in range(given.shapes)), sep="\n")
        return 0
    records, again = measure_shapes(given)
    print(f"\nSeed {given.seed}, {given.dtype}. Medians of {given.steps} steps, 10th to 90th percentile.\n")
    print("| shape | standard | flash | time × | peak × |\n| --- | --- | --- | --- | --- |")
    print(*map(line_of, records), sep="\n")
    failed = [f"{record['shape']}: {record['flash_reason']}" for record in records if record["time_ratio"] is None]
    print("", *summarise(records), sep="\n")
    print(*(f"Drawn again: {what}" for what in again), *(f"No figures of flash: {what}" for what in failed), sep="\n")
    kept = given.out / f"seed-{given.seed}.json"
    settings = {name: getattr(given, name) for name in ("seed", "dtype", "warmup", "steps", "small")}
    kept.write_text(json.dumps({**settings, "shapes": records, "drawn_again": again}, indent=1) + "\n")
    print(f"Written: {kept}")
    return 0 if len(records) == given.shapes and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
