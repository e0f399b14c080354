"""Steps as CUDA graphs: ordinary and private training, eager, captured, and compiled inside the graph.

python benchmarks/graphed.py OUT --budget 330                   # on a GPU; OUT/graphed.json after every cell
python benchmarks/graphed.py OUT --cells eager --profile bert   # eager and captured steps, and kernels of one model
python benchmarks/graphed.py OUT --tiny                         # eager cells at tiny sizes on a CPU: does it run?

All loops of a model live in one process. Blocks of steps alternate between them; a ratio is the median over pairs of
blocks, with its range. Peaks are of a step alone: allocated bytes while it is captured (or runs), and for graphs the
bytes that the process reserves for model, state and graph. Compiled cells compile the model's blocks one by one
(`block.compile()`, Inductor, mode default) unless `--whole`: one compilation serves all blocks. All eager cells come
before the first compiled one.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from dpscope import Workload

BLOCKS, BLOCK_SECONDS, MOST_STEPS = 5, 0.25, 12
TOP_KERNELS = 24


class Row(NamedTuple):
    """A model at a size: its preset, a small one for a CPU, and what `RunSpec` is told besides."""

    model: str
    tiny: str
    batch: int
    length: int | None = None
    sizes: dict[str, int] = {}  # noqa: RUF012  (never changed)
    lora: str | None = None
    dtype: str = "bf16"


ROWS = {
    "bert 32x128": Row("hf:bert", "hf:bert-tiny", 32, 128),
    "8x256 d=2048": Row("1b", "tiny", 8, 256, {"hidden_dim": 2048, "num_layers": 20}),
    "16x512 d=1024": Row("1b", "tiny", 16, 512, {"hidden_dim": 1024, "num_layers": 24}),
    "gpt2 16x256": Row("hf:gpt2", "hf:gpt2-tiny", 16, 256),
    "vit 64": Row("hf:vit", "hf:vit-tiny", 64),
    "llama-lora 4x256": Row("hf:llama", "hf:llama-tiny", 4, 256, {}, lora="r=16,alpha=32,target=q_proj,v_proj"),
    "8x1024 d=2048": Row("1b", "tiny", 8, 1024, {"hidden_dim": 2048, "num_layers": 20}),
    "resnet50 64": Row("resnet50", "resnet-tiny", 64, dtype="tf32"),
    "resnet18 64": Row("resnet18", "resnet-tiny", 64, dtype="tf32"),
    "wrn-40-4 256": Row(f"{__file__}:wide_resnet", f"{__file__}:wide_resnet_tiny", 256, dtype="tf32"),
    "ws-resnet50 64": Row(f"{__file__}:standardised_resnet", f"{__file__}:standardised_resnet_tiny", 64, dtype="tf32"),
    "t5 16x256": Row(f"{Path(__file__).with_name('rows.py')}:t5_base", "hf:bert-tiny", 16, 256),
}


class Cell(NamedTuple):
    method: str
    graphed: bool
    compiled: bool = False


EAGER, STANDARD = "standard", "standard graphed"
CELLS = {
    EAGER: Cell("standard", False),
    STANDARD: Cell("standard", True),
    "flash": Cell("flash", False),
    "flash graphed": Cell("flash", True),
}
COMPILED_STANDARD = "standard compiled graphed"
COMPILED = {
    COMPILED_STANDARD: Cell("standard", True, True),
    "flash compiled graphed": Cell("flash", True, True),
}


def wide_resnet(batch_size: int) -> Workload:
    """Return WRN-40-4 with GroupNorm."""
    return _resnet(batch_size, 64, (6, 6, 6))


def wide_resnet_tiny(batch_size: int) -> Workload:
    return _resnet(batch_size, 8, (1, 1, 1))


def standardised_resnet(batch_size: int) -> Workload:
    """Return ResNet-50 with GroupNorm and weight-standardised convolutions."""
    return _resnet(batch_size, 64, (3, 4, 6, 3), large=True)


def standardised_resnet_tiny(batch_size: int) -> Workload:
    return _resnet(batch_size, 8, (1, 1, 1, 1), large=True)


def _resnet(batch_size: int, base: int, depths: tuple[int, ...], *, large: bool = False) -> Workload:
    """Return a ResNet on images of 32², or with standardised weights in bottlenecks on images of 224² (`large`)."""
    import torch.nn.functional as F
    from any_model import StandardisedConv, resnet

    from dpscope import Workload

    conv, size = (StandardisedConv, 32 if base == 8 else 224) if large else (torch.nn.Conv2d, 32)

    def batch(seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(device).manual_seed(seed)
        images = torch.randn(batch_size, 3, size, size, generator=generator, device=device)
        return images, torch.randint(10, (batch_size,), generator=generator, device=device)

    return Workload(
        model=lambda: resnet(conv, base, depths, large, large),
        batch=batch,
        loss=lambda model, given: F.cross_entropy(model(given[0]), given[1], reduction="none"),
    )


class Loop:
    """One model and its training step. Blocks of a compiled one are compiled before the trainer sees it."""

    def __init__(self, row: Row, cell: Cell, *, tiny: bool, whole: bool) -> None:
        from dpscope.runner.spec import RunSpec
        from dpscope.runner.steps import build
        from dpscope.trainers.base import load_trainer
        from dpscope.trainers.modes import find_blocks
        from dpscope.vocabulary.methods import resolve_method
        from dpscope.workloads.configs import find_workload, make_config, parse_lora, with_lora

        name = row.tiny if tiny else row.model
        config: Any = find_workload(name) if ":" in name.removeprefix("hf:") else make_config(name)
        config = config.resized(**row.sizes) if row.sizes and not tiny else config
        config = config if row.lora is None else with_lora(config, parse_lora(row.lora))
        spec = RunSpec(
            workload=config,
            method=cell.method,
            batch_size=2 if tiny else row.batch,
            seq_len=None if row.length is None else 16 if tiny else row.length,
            dtype="fp32" if tiny else row.dtype,
            compile="default" if cell.compiled and whole else "none",
            cuda_graph=cell.graphed,
            device="cpu" if tiny else "cuda",
        )
        before = clean()
        workload, model = build(spec, spec.batch_size)
        if cell.compiled and not whole:
            for block in find_blocks(model):
                block.compile()
        self.trainer = load_trainer(resolve_method(cell.method))(model, workload.loss, spec.settings)
        self.batch = workload.batch(0, torch.device(spec.device))
        start = time.perf_counter()
        self.block(5)  # captures, at the latest in the fourth
        self.ready_seconds = time.perf_counter() - start
        self.trainer.begin_measuring()
        self.peak, self.reserved = self._memory(before) if not tiny else (None, None)

    def _memory(self, before: tuple[int, int]) -> tuple[int, int]:
        """Return the peak of allocated bytes (of a graph, in its capture), and what a graph reserves."""
        allocated, reserved = before
        if self.trainer.settings.cuda_graph:
            peak = torch.cuda.max_memory_allocated()
            clean(reset=False)
            return peak - allocated, torch.cuda.memory_reserved() - reserved
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.block(2)
        return torch.cuda.max_memory_allocated() - allocated, torch.cuda.max_memory_reserved() - reserved

    def block(self, steps: int) -> float:
        """Take steps as training does, one after the other; return milliseconds a step."""
        synchronise()
        start = time.perf_counter()
        for _ in range(steps):
            self.trainer.train_step(self.batch)
        synchronise()
        return 1e3 * (time.perf_counter() - start) / steps

    def host_ms(self) -> float:
        """Return how long the host takes to give out a step, without waiting for the device."""
        synchronise()
        start = time.perf_counter()
        self.trainer.train_step(self.batch)
        taken = 1e3 * (time.perf_counter() - start)
        synchronise()
        return taken


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clean(*, reset: bool = True) -> tuple[int, int]:
    """Free what can be freed; return the bytes that stay allocated and reserved."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0, 0
    torch.cuda.empty_cache()
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def measure(row: Row, loops: dict[str, Loop], *, tiny: bool) -> dict[str, list[float]]:
    """Return the times of blocks, which alternate between loops."""
    steps = {
        name: 1 if tiny else min(MOST_STEPS, max(2, round(1e3 * BLOCK_SECONDS / loop.block(2))))
        for name, loop in loops.items()
    }
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(2 if tiny else BLOCKS):
        for name, loop in loops.items():
            times[name].append(loop.block(steps[name]))
    return times


def figures(loops: dict[str, Loop], times: dict[str, list[float]], eager: list[float]) -> dict[str, Any]:
    """Return time, peak and ratios of each loop. `eager`: times of eager ordinary training in the same rounds."""
    base = COMPILED_STANDARD if COMPILED_STANDARD in loops else STANDARD
    found = {}
    for name, loop in loops.items():
        own = EAGER if name == "flash" else base
        found[name] = {
            "ms": statistics.median(times[name]),
            "host_ms": loop.host_ms(),
            "ready_seconds": loop.ready_seconds,
            "peak_bytes": loop.peak,
            "reserved_bytes": loop.reserved,
            "to_eager": ratio(times[name], eager),
            **({"to_own": ratio(times[name], times[own]), "against": own} if own in times and name != own else {}),
        }
        if own in loops and loop.peak and loops[own].peak:
            found[name]["peak_ratio"] = loop.peak / loops[own].peak
            found[name]["reserved_ratio"] = loop.reserved / loops[own].reserved
    return found


def ratio(times: list[float], base: list[float]) -> list[float]:
    """Return the median over pairs of blocks, the smallest and the largest."""
    pairs = sorted(a / b for a, b in zip(times, base, strict=True))
    return [statistics.median(pairs), pairs[0], pairs[-1]]


def describe(name: str, cell: str, found: dict[str, Any]) -> str:
    line = f"{name:17} {cell:26} {found['ms']:7.2f} ms, host {found['host_ms']:6.2f}, × eager {span(found['to_eager'])}"
    if "to_own" in found:
        line += f", × {found['against']} {span(found['to_own'])}"
    if "peak_ratio" in found:
        line += f", peak {found['peak_ratio']:.3f}×, reserved {found['reserved_ratio']:.3f}×"
    return line


def span(found: list[float]) -> str:
    return f"{found[0]:.3f} ({found[1]:.2f}–{found[2]:.2f})"


def profile(loops: dict[str, Loop], out: Path, name: str) -> str:
    """Write the kernels of each loop's step by time. Return how long the device and the host are busy."""
    lines, summary = [], []
    for cell, loop in loops.items():
        wall, host = loop.block(5), loop.host_ms()
        with torch.profiler.profile() as profiler:
            loop.block(2)
        kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for event in profiler.key_averages():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kernels[event.key][0] += event.self_device_time_total / 2e3
                kernels[event.key][1] += event.count / 2
        busy = sum(each for each, _ in kernels.values())
        summary.append(f"{name}, {cell}: step {wall:.2f} ms, device busy {busy:.2f}, host {host:.2f}")
        lines.append(summary[-1])
        top = sorted(kernels.items(), key=lambda item: -item[1][0])[:TOP_KERNELS]
        lines += [f"  {each:8.3f} ms {count:7.1f} calls  {kernel[:120]}" for kernel, (each, count) in top]
    (out / f"profile-{name.replace(' ', '-')}.txt").write_text("\n".join(lines))
    return "\n".join(summary)


class Run:
    """The whole measurement: its budget, and what it has found so far."""

    def __init__(self, out: Path, options: argparse.Namespace) -> None:
        self.out, self.options = out, options
        self.deadline = time.monotonic() + options.budget
        self.lines: list[str] = []
        device = "CPU" if options.tiny else torch.cuda.get_device_name()
        self.found: dict[str, Any] = {"device": device, "torch": torch.__version__, "whole": options.whole, "rows": {}}

    def rows(self) -> list[tuple[str, Row]]:
        return [(n, r) for n, r in ROWS.items() if not self.options.only or any(w in n for w in self.options.only)]

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)
        (self.out / "graphed.json").write_text(json.dumps(self.found, indent=1) + "\n")
        (self.out / "graphed.txt").write_text("\n".join(self.lines) + "\n")

    def cells(self, name: str, row: Row, cells: dict[str, Cell]) -> None:
        """Measure the cells of a row beside each other; cells that fail say why."""
        if time.monotonic() > self.deadline:
            self.say(f"{name:17} not measured: the budget is spent")
            return
        loops: dict[str, Loop] = {}
        for key, cell in cells.items():
            try:
                loops[key] = Loop(row, cell, tiny=self.options.tiny, whole=self.options.whole)
            except Exception as error:
                self.say(f"{name:17} {key:26} {type(error).__name__}: {str(error)[:300]}")
                if key == EAGER:
                    return
        times = measure(row, loops, tiny=self.options.tiny)
        kept = self.found["rows"].setdefault(name, {})
        kept |= figures(loops, times, times[EAGER])
        for key in loops:
            self.say(describe(name, key, kept[key]))
        if any(word in name for word in self.options.profile):
            self.say(profile(loops, self.out, name))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=330.0, help="seconds after which no row is begun")
    parser.add_argument("--only", nargs="*", default=[], help="parts of rows' names")
    parser.add_argument("--cells", choices=("all", "eager", "compiled"), default="all")
    parser.add_argument("--profile", nargs="*", default=[], help="parts of names of rows whose kernels are listed")
    parser.add_argument("--whole", action="store_true", help="compile whole models, not their blocks")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    run = Run(options.out, options)
    graphs = not options.tiny
    if options.cells != "compiled":
        for name, row in run.rows():
            run.cells(name, row, {key: cell for key, cell in CELLS.items() if graphs or not cell.graphed})
            clean()
    if options.cells != "eager" and graphs:
        for name, row in run.rows():
            torch._dynamo.reset()
            run.cells(name, row, {EAGER: CELLS[EAGER], **COMPILED})
            clean()
    print("", *run.lines, sep="\n")


if __name__ == "__main__":
    main()
