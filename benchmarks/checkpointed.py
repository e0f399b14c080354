"""Training with every block checkpointed: ordinary, flash clipping that holds blocks, and that recomputes them.

    python benchmarks/checkpointed.py [--batch 8] [--length 1024] [--reentrant] [--budget 25e9]

A plain loop around the decoder of `dpscope compare` (preset 1b unless other sizes are given; tiny on a CPU), with AdamW
and noise. Prints the median time of a step and the peak of memory, and both × ordinary training. On CUDA the peak is
the allocator's; on a CPU it is that of one step above what was live before it, by torch's profiler.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dpscope.flash.engine import FlashEngine
from dpscope.flash.private_optimizer import DPFlashOptimizer
from dpscope.workloads.configs import TransformerConfig
from dpscope.workloads.transformer import SimpleBigModel


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

    def __init__(self, options: argparse.Namespace, budget: float | str | bool | None) -> None:
        torch.manual_seed(0)
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
            self.engine = FlashEngine(self.model, max_grad_norm=1.0, memory_budget=budget)
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
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024 if on_gpu else 128)
    parser.add_argument("--width", type=int, default=2048 if on_gpu else 64)
    parser.add_argument("--layers", type=int, default=20 if on_gpu else 4)
    parser.add_argument("--heads", type=int, default=16 if on_gpu else 4)
    parser.add_argument("--vocabulary", type=int, default=32000 if on_gpu else 64)
    parser.add_argument("--steps", type=int, default=10 if on_gpu else 3)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16" if on_gpu else "fp32")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--reentrant", action="store_true", help="the other kind of torch.utils.checkpoint")
    parser.add_argument("--budget", type=float, action="append", default=[], help="bytes; may be given several times")
    options = parser.parse_args(arguments)
    kinds = {"standard": False, "flash": None, "flash lean": "lean", **{f"flash {b:.3g}": b for b in options.budget}}
    print(f"{options.batch} × {options.length}, every block checkpointed, {options.dtype}, {options.device}")
    print(f"{'':14}{'ms':>10}{'×':>7}{'peak MB':>12}{'×':>7}  blocks")
    first: tuple[float, int] | None = None
    for name, budget in kinds.items():
        training = Training(options, budget)
        for _ in range(3):
            training.step()
        took = statistics.median(training.milliseconds() for _ in range(options.steps))
        peak = training.peak_bytes()
        first = first or (took, peak)
        ratios = took / first[0], peak / first[1]
        print(
            f"{name:14}{took:10.1f}{ratios[0]:7.2f}{peak / 1e6:12.1f}{ratios[1]:7.2f}  {training.blocks()}", flush=True
        )
        del training
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
