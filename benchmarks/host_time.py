"""How long the host is busy with a training step: ordinary training, and flash clipping, by phase.

    python benchmarks/host_time.py [--layers 20] [--steps 30] [--profile] [--lean]

A step whose kernels are short waits for Python: what counts then is how long the host takes to give out the work. The
model is the decoder of `dpscope compare`, with as many layers but very narrow, so that nothing but the host's time is
left. On a CPU the kernels of flash clipping are not run: their arguments and tables are made as for a GPU, and the
launch itself is left out. So the results are wrong numbers and right times; on a CUDA device everything runs. With
`--lean` every block is checkpointed, and flash clipping has the memory budget "lean".

Times are of the thread that trains, and do not count while others have its core: medians, and the shortest.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import os
import pkgutil
import pstats
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # so that kernels can be defined where there is no GPU

from checkpointed import CheckpointedModel

from dpscope.flash import kernels
from dpscope.flash.engine import FlashEngine
from dpscope.flash.private_optimizer import DPFlashOptimizer
from dpscope.workloads.configs import TransformerConfig
from dpscope.workloads.transformer import SimpleBigModel

PHASES = ("forward", "backward", "step")


class NotLaunched:
    """Stands in for a kernel: takes its arguments and does nothing."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getitem__(self, grid: Any) -> NotLaunched:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass


def leave_out_launches() -> None:
    """Every call that a kernel could serve on a GPU is served, up to its launch."""
    for info in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(info.name)
        for name, value in list(vars(module).items()):
            if name == "use_triton":
                module.use_triton = lambda backend, device, *, served, why_not="": backend != "torch" and served
            elif name == "is_hopper":
                module.is_hopper = lambda device: True
            elif type(value).__module__.startswith("triton.runtime") and name.endswith("_kernel"):
                setattr(module, name, NotLaunched(name))
    from dpscope.flash import block_reruns, optimizer

    # What no kernel has written is not the same twice.
    block_reruns.BlockReruns._refuse_other_gradients = lambda self, each: None
    optimizer.use_triton = lambda backend, device, *, served, why_not="": True


@dataclass
class Training:
    batch: int
    length: int
    layers: int
    flash: bool
    device: str
    lean: bool = False
    times: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})

    def __post_init__(self) -> None:
        config = TransformerConfig(
            name="narrow", vocab_size=64, hidden_dim=16, num_layers=self.layers, num_heads=2, max_seq_len=self.length
        )
        with torch.device(self.device):
            self.model = (CheckpointedModel if self.lean else SimpleBigModel)(config)
            tokens = torch.randint(64, (self.batch, self.length + 1))
        self.x, self.y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        if self.flash:
            engine = FlashEngine(self.model, max_grad_norm=1.0, memory_budget="lean" if self.lean else None)
            optimizer = DPFlashOptimizer(
                optimizer, engine=engine, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=self.batch
            )
        self.optimizer = optimizer

    def step(self) -> None:
        # Backward runs on a thread of autograd's on a GPU, so there the clock is the wall's.
        clock = time.perf_counter if self.device == "cuda" else time.thread_time
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.optimizer.zero_grad()
        start = clock()
        with torch.autocast(self.device, torch.bfloat16):
            loss = F.cross_entropy(self.model(self.x).flatten(0, 1), self.y.flatten())
        forward = clock()
        loss.backward()
        backward = clock()
        self.optimizer.step()
        for phase, passed in zip(PHASES, (forward - start, backward - forward, clock() - backward), strict=True):
            self.times[phase].append(1e3 * passed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lean", action="store_true", help="every block checkpointed, flash with as little memory")
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes in flash clipping")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device == "cpu":
        leave_out_launches()
    trainings = {
        name: Training(options.batch, options.length, options.layers, name == "flash", options.device, options.lean)
        for name in ("standard", "flash")
    }
    for _ in range(options.steps + 5):  # side by side, so that the machine's moods reach both
        for training in trainings.values():
            training.step()
    taps = sum(len(list(module.parameters(recurse=False))) > 0 for module in trainings["flash"].model.modules())
    print(f"{taps} layers, {options.device}: host ms a step, median (shortest) of {options.steps}")
    print(f"{'':10}" + "".join(f"{phase:>18}" for phase in PHASES))
    for name, training in trainings.items():
        times = [training.times[phase][5:] for phase in PHASES]
        print(f"{name:10}" + "".join(f"{statistics.median(t):10.2f} ({min(t):5.2f})" for t in times))
    for phase in PHASES[:2]:
        more = min(trainings["flash"].times[phase][5:]) - min(trainings["standard"].times[phase][5:])
        print(f"{phase}: {1e3 * more / taps:.1f} µs more a layer")
    if options.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(10):
            trainings["flash"].step()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(35)


if __name__ == "__main__":
    main()
