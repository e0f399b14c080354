"""The results table of the README, the site and lesson 5: measure it on a GPU, write it into the pages.

python benchmarks/headline.py measure OUT --budget 560   # on a GPU; OUT/headline.json after every cell
python benchmarks/headline.py measure OUT --tiny         # the same code at tiny sizes on a CPU: does it run?
python benchmarks/headline.py write                      # pages from benchmarks/results/headline.json

`measure` runs in one process. Each cell builds its model alone, takes its peak memory in clear steps (the first steps,
in which flash clipping verifies the model, are over), then builds the model it is compared with beside it. Blocks of
steps alternate between the two. The ratio is the median over pairs of blocks, its spread the smallest and the largest.
Eager cells of all rows come first, compiled ones last, so that a short budget loses only compiled cells.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dpscope import Workload

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "headline.json"
PACKAGES = ("torch", "triton", "opacus", "transformers", "peft")
WARMUP, BLOCKS, BLOCK_SECONDS = 4, 5, 0.4


class Row(NamedTuple):
    """A model at the size that people train: its names on the pages, its preset, and a small preset for a CPU."""

    label: str
    label_zh: str
    model: str
    tiny: str
    batch: int
    length: int | None
    sizes: dict[str, int] = {}  # noqa: RUF012  (never changed)
    lora: str | None = None


ROWS = {
    "gpt2": Row("GPT-2 124M, 16 × 256", "GPT-2 124M，16 × 256", "hf:gpt2", "hf:gpt2-tiny", 16, 256),
    "decoder": Row(
        "decoder 1.4B, 8 × 1024", "解码器 1.4B，8 × 1024", "1b", "tiny", 8, 1024, {"hidden_dim": 2048, "num_layers": 24}
    ),
    "bert": Row("BERT-base, 32 × 128", "BERT-base，32 × 128", "hf:bert", "hf:bert-tiny", 32, 128),
    "vit": Row("ViT-B/16, batch 64", "ViT-B/16，批大小 64", "hf:vit", "hf:vit-tiny", 64, None),
    "llama-lora": Row(
        *("Llama 1.2B with LoRA r=16, 4 × 1024", "Llama 1.2B，LoRA r=16，4 × 1024", "hf:llama", "hf:llama-tiny"),
        *(4, 1024, {}, "r=16,alpha=32,target=q_proj,v_proj"),
    ),
    "resnet50": Row("ResNet-50, batch 64", "ResNet-50，批大小 64", "resnet50", "resnet-tiny", 64, None),
    "t5": Row("T5-base, 16 × 256", "T5-base，16 × 256", f"{__file__}:t5_base", f"{__file__}:t5_tiny", 16, 256),
}


class Cell(NamedTuple):
    """A column: how the model is trained, and the column it is compared with."""

    method: str
    compile: str
    base: str | None
    title: str
    title_zh: str
    dtype: str = "bf16"


CELLS = {
    "standard": Cell("standard", "none", None, "ordinary training", "普通训练"),
    "flat": Cell("flat", "none", "standard", "Opacus flat", "Opacus flat"),
    "ghost": Cell("ghost", "none", "standard", "Opacus ghost", "Opacus ghost"),
    "flash": Cell("flash", "none", "standard", "**flash clipping**", "**flash clipping**"),
    "standard compiled": Cell("standard", "default", "standard", "ordinary, compiled", "普通训练，编译后"),
    "flash compiled": Cell("flash", "default", "standard compiled", "**flash, compiled**", "**flash，编译后**"),
}


# -- measure -----------------------------------------------------------------------------------------------------------


def t5_base(batch_size: int, seq_len: int) -> Workload:
    return _t5(batch_size, seq_len, {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12})


def t5_tiny(batch_size: int, seq_len: int) -> Workload:
    return _t5(batch_size, seq_len, {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16})


def _t5(batch_size: int, seq_len: int, sizes: dict[str, int]) -> Workload:
    """Return T5 as a workload: an encoder and a decoder that read the same random tokens."""
    import torch
    import torch.nn.functional as F
    from transformers import T5Config, T5ForConditionalGeneration

    from dpscope import Workload

    config = T5Config(**sizes, dropout_rate=0.0)

    def batch(seed: int, device: torch.device) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randint(5, config.vocab_size, (batch_size, seq_len), generator=generator, device=device)

    def loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids, decoder_input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean(1)

    return Workload(model=lambda: T5ForConditionalGeneration(config), batch=batch, loss=loss)


class Loop:
    """One model and its training step, on the device."""

    def __init__(self, row: Row, cell: Cell, *, tiny: bool) -> None:
        from dpscope.runner.assembly import assemble
        from dpscope.runner.spec import RunSpec
        from dpscope.workloads.configs import find_workload, make_config, parse_lora, with_lora

        name = row.tiny if tiny else row.model
        config = find_workload(name) if ":" in name.removeprefix("hf:") else make_config(name)
        if row.sizes and not tiny:
            config = config.resized(**row.sizes)
        if row.lora is not None:
            config = with_lora(config, parse_lora(row.lora))
        spec = RunSpec(
            workload=config,
            method=cell.method,
            compile=cell.compile,
            batch_size=2 if tiny else row.batch,
            seq_len=None if row.length is None else 16 if tiny else row.length,
            dtype=cell.dtype,
            device=device(),
        )
        self.trainer, self.batches = assemble(spec)
        self.block(WARMUP)
        self.trainer.begin_measuring()

    def block(self, steps: int) -> float:
        """Take steps as training does, one after the other; return milliseconds a step."""
        synchronise()
        start = time.perf_counter()
        for _ in range(steps):
            self.trainer.train_step(*self.batches)
        synchronise()
        return 1e3 * (time.perf_counter() - start) / steps


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronise() -> None:
    import torch

    if device() == "cuda":
        torch.cuda.synchronize()


def clean() -> int:
    """Free what can be freed; return the bytes that stay."""
    import torch

    torch._dynamo.reset()
    gc.collect()
    if device() == "cpu":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_of(loop: Loop, before: int) -> int | None:
    """Return the peak of two clear steps above what was allocated before the model was built."""
    import torch

    if device() == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats()
    loop.block(2)
    return torch.cuda.max_memory_allocated() - before


def measure_cell(row: Row, cell: Cell, *, tiny: bool) -> dict[str, Any]:
    """Return the figures of one cell: its time and peak, and both as ratios to the cell it is compared with."""
    before = clean()
    start = time.perf_counter()
    loop = Loop(row, cell, tiny=tiny)
    first = time.perf_counter() - start
    found: dict[str, Any] = {"status": "ok", "peak_bytes": peak_of(loop, before), "ready_seconds": round(first, 1)}
    steps = 1 if tiny else min(12, max(3, math.ceil(BLOCK_SECONDS * 1e3 / loop.block(2))))
    if cell.base is None:
        times = [loop.block(steps) for _ in range(BLOCKS)]
        return found | {"ms": statistics.median(times), "least_ms": min(times), "most_ms": max(times)}
    beside = Loop(row, CELLS[cell.base], tiny=tiny)
    pairs = [(beside.block(steps), loop.block(steps)) for _ in range(BLOCKS)]
    ratios = [own / base for base, own in pairs]
    return found | {
        "ms": statistics.median(own for _, own in pairs),
        "base_ms": statistics.median(base for base, _ in pairs),
        "time_ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
    }


def measure_or_say_why(row: Row, cell: Cell, *, tiny: bool) -> dict[str, Any]:
    """Measure a cell; if it fails, return its status and the first line of the reason."""
    import torch

    from dpscope.errors import UserError

    try:
        return measure_cell(row, cell, tiny=tiny)
    except torch.OutOfMemoryError:
        return {"status": "oom", "reason": "out of GPU memory"}
    except Exception as error:
        status = "refused" if isinstance(error, UserError) else "failed"
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return {"status": status, "reason": reason[0][:300]}


def measure(out: Path, *, budget: float, tiny: bool, only: list[str], command: str) -> dict[str, Any]:
    """Measure all cells within `budget` seconds and write OUT/headline.json after each."""
    warnings.filterwarnings("ignore")
    deadline = time.monotonic() + budget
    run: dict[str, Any] = {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "device": device_name(),
        "versions": versions(),
        "rows": {},
    }
    for eager in (True, False):
        for name, row in ROWS.items():
            kept = run["rows"].setdefault(name, {"label": row.label, "label_zh": row.label_zh, "cells": {}})
            for key, cell in CELLS.items():
                if (cell.compile == "none") != eager or (only and name not in only):
                    continue
                if time.monotonic() > deadline:
                    kept["cells"][key] = {"status": "not measured", "reason": "the time budget was spent"}
                else:
                    kept["cells"][key] = measure_or_say_why(row, cell, tiny=tiny)
                    add_peak_ratio(kept["cells"], key, cell)
                    print(f"{name:12} {key:18} {describe(kept['cells'][key])}", flush=True)
                (out / "headline.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
                clean()
    return run


def add_peak_ratio(cells: dict[str, Any], key: str, cell: Cell) -> None:
    base, own = cells.get(cell.base or "", {}).get("peak_bytes"), cells[key].get("peak_bytes")
    if base and own:
        cells[key]["peak_ratio"] = own / base


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if device() == "cuda" else "CPU"


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe(cell: dict[str, Any]) -> str:
    if cell["status"] != "ok":
        return f"{cell['status']}: {cell.get('reason', '')[:100]}"
    peak = "" if cell["peak_bytes"] is None else f", {cell['peak_bytes'] / 2**30:.2f} GiB"
    if "time_ratio" not in cell:
        return f"{cell['ms']:.1f} ms ({cell['least_ms']:.1f}–{cell['most_ms']:.1f}){peak}"
    spread = f"{cell['least_ratio']:.2f}–{cell['most_ratio']:.2f}"
    return f"{cell['ms']:.1f} ms, {cell['time_ratio']:.2f}× ({spread}){peak}, ready in {cell['ready_seconds']} s"


# -- write -------------------------------------------------------------------------------------------------------------

BEGIN, END = "<!-- headline: begin -->", "<!-- headline: end -->"
STATUS_ZH = {"refused": "不支持", "oom": "显存不足", "failed": "出错", "not measured": "未测"}
STATUS = {"refused": "refused", "oom": "out of memory", "failed": "fails", "not measured": "not measured"}


def figure(cell: dict[str, Any] | None, *, chinese: bool) -> str:
    """Return a cell of the table: `1.08×, 0.98×`, or `127 ms, 30.2 GiB`, or why there is no figure."""
    cell = cell or {"status": "not measured"}
    comma = "，" if chinese else ", "
    if cell["status"] != "ok":
        return (STATUS_ZH if chinese else STATUS)[cell["status"]]
    if "time_ratio" not in cell:
        peak = cell["peak_bytes"]
        return f"{cell['ms']:.0f} ms" + ("" if peak is None else f"{comma}{peak / 2**30:.1f} GiB")
    peak_ratio = cell.get("peak_ratio")
    return f"{cell['time_ratio']:.2f}×" + ("" if peak_ratio is None else f"{comma}{peak_ratio:.2f}×")


def table(run: dict[str, Any], *, chinese: bool) -> list[str]:
    titles = [cell.title_zh if chinese else cell.title for cell in CELLS.values()]
    lines = [f"| {'模型，批大小' if chinese else 'model, batch'} | {' | '.join(titles)} |", "| --- " * 7 + "|"]
    for row in run["rows"].values():
        figures = [figure(row["cells"].get(key), chinese=chinese) for key in CELLS]
        lines.append(f"| {row['label_zh' if chinese else 'label']} | {' | '.join(figures)} |")
    return lines


def reasons(run: dict[str, Any], *, chinese: bool) -> list[str]:
    """Return a sentence for each cell that was tried and has no figure."""
    return [
        f"{row['label_zh']}，{CELLS[key].title_zh}：{cell['reason'].rstrip('.')}。"
        if chinese
        else f"{row['label']}, {CELLS[key].title}: {cell['reason'].rstrip('.')}."
        for row in run["rows"].values()
        for key, cell in row["cells"].items()
        if cell["status"] in ("refused", "failed", "oom")
    ]


def block(run: dict[str, Any], link: Callable[[str], str], *, chinese: bool) -> str:
    """Return what stands between the markers: where the figures come from, the table, and how to read it."""
    used = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    raw = link("benchmarks/results/headline.json")
    peak, peak_zh = run.get("peak", "of a clear step"), run.get("peak_zh", "取首步校验之后的步")
    without = "".join(f"\n- {line}" for line in reasons(run, chinese=chinese))
    without = without and f"\n\n{'没有数字的格子：' if chinese else 'Cells without a figure:'}\n{without}"
    if chinese:
        head = (
            f"一块 {run['device']}，bf16，AdamW，{run['date']}（{used}）。"
            "每步时间和显存峰值，相对同一次运行的普通训练："
        )
        foot = (
            f"编译后的 flash 相对编译后的普通训练。峰值{peak_zh}。数值大于 1 表示更慢或更占显存。波动见原始数据。"
            f"命令：`{run['command']}`；[原始数据]({raw})。{without}"
        )
    else:
        head = (
            f"One {run['device']}, bf16, AdamW, {run['date']} ({used}). Step time and peak memory relative to ordinary "
            "training in the same run:"
        )
        foot = (
            f"Compiled flash is relative to compiled ordinary training. Peaks are {peak}. Above 1 is slower or larger. "
            f"Spread: in the raw figures. Command: `{run['command']}`; [raw figures]({raw}).{without}"
        )
    return "\n".join([head, "", *table(run, chinese=chinese), "", foot])


class Page(NamedTuple):
    """A file with markers, its language, and the way from its folder to the root of the repository."""

    path: str
    chinese: bool
    root: str


# The landing pages of the site include the block of the READMEs.
PAGES = (
    Page("README.md", chinese=False, root=""),
    Page("README.zh-CN.md", chinese=True, root=""),
    Page("tutorials/05-what-privacy-costs.py", chinese=False, root="../"),
    Page("tutorials/zh/05-what-privacy-costs.py", chinese=True, root="../../"),
)


def written(page: Page, text: str, run: dict[str, Any]) -> str:
    """Return a page's text with the block between its markers made again."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page.path} has no {BEGIN} … {END}: put the markers back where the table belongs")
    made = block(run, lambda path: page.root + path, chinese=page.chinese)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def write(results: Path = RESULTS) -> list[str]:
    """Write the block of every page again; return the pages that have changed."""
    run = json.loads(results.read_text(encoding="utf-8"))
    changed = []
    for page in PAGES:
        file = ROOT / page.path
        text = file.read_text(encoding="utf-8")
        made = written(page, text, run)
        if made != text:
            file.write_text(made, encoding="utf-8")
            changed.append(page.path)
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="do", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("out", type=Path)
    measuring.add_argument("--budget", type=float, default=560, help="seconds after which no further cell is begun")
    measuring.add_argument("--tiny", action="store_true", help="sizes for a CPU: figures that mean nothing")
    measuring.add_argument("--only", nargs="+", default=[], choices=list(ROWS))
    commands.add_parser("write")
    given = parser.parse_args()
    if given.do == "measure":
        given.out.mkdir(parents=True, exist_ok=True)
        command = " ".join(["python benchmarks/headline.py measure OUT", *sys.argv[3:]])
        run = measure(given.out, budget=given.budget, tiny=given.tiny, only=given.only, command=command)
        print("\n".join(["", *table(run, chinese=False), f"{given.out / 'headline.json'}"]))
        return 0
    changed = write()
    print("\n".join(changed) or "nothing has changed")
    if any(page.startswith("tutorials") for page in changed):  # the notebooks beside the sources
        subprocess.run([sys.executable, str(ROOT / "tutorials" / "build.py"), "--text", "05"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
