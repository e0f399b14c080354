"""Training with every block checkpointed: ordinary, flash clipping that holds blocks, and that recomputes them.

    python benchmarks/checkpointed.py [--batch 8] [--length 1024] [--reentrant] [--budget 25e9] [--budget ordinary]
    python benchmarks/checkpointed.py --kinds lean per_layer --kernels 30
    python benchmarks/checkpointed.py --kinds per_layer --batch 8 32 --out FOLDER

A plain loop around the decoder of `dpscope compare` (preset 1b unless other sizes are given; tiny on a CPU), with AdamW
and noise. Prints the median time of a step and the peak of memory, and both × ordinary training. On CUDA the peak is
the allocator's; on a CPU it is that of one step above what was live before it, by torch's profiler. A budget of
"ordinary" is the peak that ordinary training has just had. `per_layer` is that clipping rule with the budget "lean":
blocks are summed in backward. `--kernels` prints the GPU's time by kernel as well.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dpscope.flash.engine import FlashEngine
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
from dpscope.workloads.built_in import SimpleBigModel
from dpscope.workloads.configs import TransformerConfig


class CheckpointedModel(SimpleBigModel):
    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Training:
    """`budget`: of flash clipping; False: ordinary training."""

    def __init__(self, options: argparse.Namespace, budget: float | str | bool | None, clipping: str) -> None:
        torch.manual_seed(0)
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()  # flash clipping reads off it what forward and loss take
        config = TransformerConfig(
            name="checkpointed",
            vocab_size=options.vocabulary,
            hidden_dim=options.width,
            num_layers=options.layers,
            num_heads=options.heads,
            max_seq_len=options.length,
        )
        self.device = options.device
        with torch.device(self.device):
            self.model = CheckpointedModel(config)
            tokens = torch.randint(options.vocabulary, (options.batch, options.length + 1))
        self.model.reentrant = options.reentrant
        self.x, self.y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.autocast = options.dtype == "bf16"
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.engine: FlashEngine | None = None
        if budget is not False:
            self.engine = FlashEngine(self.model, max_grad_norm=1.0, clipping=clipping, memory_budget=budget)
            self.optimizer = DPFlashOptimizer(
                self.optimizer,
                engine=self.engine,
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                expected_batch_size=options.batch,
            )

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            loss = F.cross_entropy(self.model(self.x).flatten(0, 1), self.y.flatten())
        loss.backward()
        self.optimizer.step()

    def milliseconds(self) -> float:
        if self.device != "cuda":
            start = time.perf_counter()
            self.step()
            return 1e3 * (time.perf_counter() - start)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def peak_bytes(self) -> int:
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return torch.cuda.max_memory_allocated()
        with torch.profiler.profile(profile_memory=True) as profile:
            self.step()
        live = peak = 0
        for change in _allocations(profile):
            live += change
            peak = max(peak, live)
        return peak

    def kernels(self, count: int) -> str:
        """The GPU's time in one step, in ms: in all, and of the `count` kernels that take the most."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.step()
            torch.cuda.synchronize()
        rows = [(e.self_device_time_total / 1e3, e.count, e.key) for e in profile.key_averages()]
        rows.sort(reverse=True)
        lines = [f"{ms:10.2f} ms {calls:6} {name[:110]}" for ms, calls, name in rows[:count]]
        return "\n".join([f"{sum(ms for ms, _, _ in rows):10.2f} ms in kernels", *lines])

    def blocks(self) -> str:
        rows = [] if self.engine is None else self.engine.explain().blocks
        return ", ".join(f"{count} {how}" for how, count in Counter(row.how for row in rows).items())


def _allocations(profile: torch.profiler.profile) -> Iterator[int]:
    """Bytes allocated (freed where negative), in the order of time."""
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))


def main(arguments: list[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--out", type=Path, help="folder for the table, written after every row")
    parser.add_argument("--length", type=int, default=1024 if on_gpu else 128)
    parser.add_argument("--width", type=int, default=2048 if on_gpu else 64)
    parser.add_argument("--layers", type=int, default=20 if on_gpu else 4)
    parser.add_argument("--heads", type=int, default=16 if on_gpu else 4)
    parser.add_argument("--vocabulary", type=int, default=32000 if on_gpu else 64)
    parser.add_argument("--steps", type=int, default=10 if on_gpu else 3)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16" if on_gpu else "fp32")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--reentrant", action="store_true", help="the other kind of torch.utils.checkpoint")
    parser.add_argument(
        "--budget", action="append", default=[], help='bytes, or "ordinary"; may be given several times'
    )
    parser.add_argument("--kinds", nargs="*", choices=("flash", "lean", "per_layer"), default=["flash", "lean"])
    parser.add_argument("--kernels", type=int, default=0, help="so many kernels of each kind of training (CUDA)")
    options = parser.parse_args(arguments)
    for batch in options.batch:
        measure(argparse.Namespace(**{**vars(options), "batch": batch}))


def measure(options: argparse.Namespace) -> None:
    """Print a table of one size, and append it to a file."""
    budgets: dict[str, float | str | bool | None] = {"flash": None, "lean": "lean", "per_layer": "lean"}
    kinds = {"standard": False, **{kind: budgets[kind] for kind in options.kinds}}
    kinds |= {f"budget {each}": each if each == "ordinary" else float(each) for each in options.budget}

    def say(line: str) -> None:
        print(line, flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            with (options.out / "checkpointed.txt").open("a") as file:
                file.write(f"{line}\n")

    say(f"{options.batch} × {options.length}, every block checkpointed, {options.dtype}, {options.device}")
    say(f"{'':16}{'ms':>10}{'×':>7}{'peak MB':>12}{'×':>7}  blocks")
    first: tuple[float, int] | None = None
    for name, budget in kinds.items():
        clipping = "per_layer" if name == "per_layer" else "flat"
        training = Training(options, first[1] if budget == "ordinary" and first else budget, clipping)
        for _ in range(3):
            training.step()
        took = statistics.median(training.milliseconds() for _ in range(options.steps))
        peak = training.peak_bytes()
        first = first or (took, peak)
        ratios = took / first[0], peak / first[1]
        say(f"{name:16}{took:10.1f}{ratios[0]:7.2f}{peak / 1e6:12.1f}{ratios[1]:7.2f}  {training.blocks()}")
        if options.kernels:
            say(training.kernels(options.kernels))
        del training
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
