"""How long the host is busy with a training step: ordinary training, and flash clipping, by phase.

    python benchmarks/host_time.py [--model decoder|gpt2|vit|resnet50|ws-resnet50] [--layers 20] [--path keep]

A step whose kernels are short waits for Python: what counts then is how long the host takes to give out the work. The
models have as many layers as real ones but are very narrow, so that nothing but the host's time is left. On a CPU the
kernels of flash clipping are not run: their arguments and tables are made as for a GPU, and the launch itself is left
out. So the results are wrong numbers and right times; on a CUDA device everything runs. With `--lean` every block is
checkpointed, and flash clipping has the memory budget "lean".

Times are of the thread that trains, and do not count while others have its core: medians, and the shortest. Calls are
those of Python and of C that Python's profiler sees in a step, operators those of torch that its profiler sees (one
that calls another counts twice): their numbers do not depend on the machine.
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
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # so that kernels can be defined where there is no GPU

from any_model import StandardisedConv, resnet  # beside this file

from dpscope.flash import kernels
from dpscope.flash.engine import FlashEngine
from dpscope.flash.gradients.paths import FORCEABLE, GRAM
from dpscope.flash.opacus.private_optimizer import DPFlashOptimizer
from dpscope.trainers.modes import checkpoint_blocks
from dpscope.workloads.configs import TransformerConfig, WorkloadConfig, make_config
from dpscope.workloads.workload import build_workload

CONVOLUTIONS: dict[str, type[nn.Conv2d]] = {"resnet50": nn.Conv2d, "ws-resnet50": StandardisedConv}
PHASES = ("forward", "backward", "step")
WARMUP = 17  # steps: modules with bare parameters are checked at the 2nd, 4th, 8th and 16th
PROFILED = 10


def narrow_config(model: str, layers: int, length: int) -> WorkloadConfig:
    if model == "decoder":
        return TransformerConfig(
            name="narrow", vocab_size=64, hidden_dim=16, num_layers=layers, num_heads=2, max_seq_len=length
        )
    return make_config(f"hf:{model}-tiny", num_layers=layers, hidden_dim=16, num_heads=2)


class NotLaunched:
    """Stands in for a kernel: takes its arguments, counts the launch and does nothing."""

    launches: ClassVar[Counter[str]] = Counter()

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getitem__(self, grid: Any) -> NotLaunched:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.launches[self.__name__] += 1


def leave_out_launches() -> None:
    """Every call that a kernel could serve on a GPU is served, up to its launch."""
    for info in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # Gluon's kernels, where Triton is older or not there
            continue
        for name, value in list(vars(module).items()):
            if name == "use_triton":
                module.use_triton = lambda backend, device, *, served, why_not="": backend != "torch" and served
            elif name == "is_hopper":
                module.is_hopper = lambda device: True
            elif type(value).__module__.startswith("triton.runtime") and name.endswith("_kernel"):
                setattr(module, name, NotLaunched(name))
    from dpscope.flash.checkpointing import closing
    from dpscope.flash.sample_rows import verification
    from dpscope.flash.update import optimizer

    # What no kernel has written is not the same twice.
    closing.different = lambda before, again, finite: [False] * len(before)
    for name in ("_verify", "_look_again"):  # they would find that results are wrong numbers
        setattr(verification.Verification, name, lambda self, *call, **how: None)
    verification.Verification.settle = lambda self, unknown, *call: verification._note_known(unknown)
    optimizer.use_triton = lambda backend, device, *, served, why_not="": True


@dataclass
class Training:
    model_name: str
    layers: int
    batch: int
    length: int
    flash: bool
    device: str
    path: str
    lean: bool = False
    clipping: str = "flat"
    times: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})

    def __post_init__(self) -> None:
        with torch.device(self.device):
            self._build()
        if self.lean:
            checkpoint_blocks(self.model)
        optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        if self.flash:
            budget = "lean" if self.lean else None
            engine = FlashEngine(
                self.model, max_grad_norm=1.0, path=self.path, memory_budget=budget, clipping=self.clipping
            )
            optimizer = DPFlashOptimizer(
                optimizer, engine=engine, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=self.batch
            )
        self.optimizer = optimizer

    def _build(self) -> None:
        if self.model_name in CONVOLUTIONS:
            self.model = resnet(CONVOLUTIONS[self.model_name], 12, (3, 4, 6, 3), True, True)
            self.loss = lambda model, rows: F.cross_entropy(model(rows[0]), rows[1], reduction="none")
            self.rows = torch.randn(self.batch, 3, 32, 32), torch.randint(10, (self.batch,))
            return
        config = narrow_config(self.model_name, self.layers, self.length)
        length = None if config.resolve_seq_len(None) is None else self.length
        workload = build_workload(config, batch_size=self.batch, seq_len=length)
        self.model = workload.model()
        self.loss, self.rows = workload.loss, workload.batch(0, torch.device(self.device))

    def step(self) -> None:
        # Backward runs on a thread of autograd's on a GPU, so there the clock is the wall's.
        clock = time.perf_counter if self.device == "cuda" else time.thread_time
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.optimizer.zero_grad()
        start = clock()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.model_name not in CONVOLUTIONS):
            loss = self.loss(self.model, self.rows).mean()
        forward = clock()
        loss.backward()
        backward = clock()
        self.optimizer.step()
        for phase, passed in zip(PHASES, (forward - start, backward - forward, clock() - backward), strict=True):
            self.times[phase].append(1e3 * passed)


def profiled(training: Training, steps: int) -> pstats.Stats:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        training.step()
    profile.disable()
    return pstats.Stats(profile)


def operators(training: Training) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        training.step()
    return sum(event.name.startswith("aten::") for event in profile.events())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("decoder", "gpt2", "vit", *CONVOLUTIONS), default="decoder")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--path", choices=FORCEABLE, default=GRAM, help="of all norms (default: what wide models take)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lean", action="store_true", help="every block checkpointed, flash with as little memory")
    parser.add_argument("--clipping", default="flat", help="clipping rule")
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes in flash clipping")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device == "cpu":
        leave_out_launches()
    trainings = {
        name: Training(
            options.model,
            options.layers,
            options.batch,
            options.length,
            name == "flash",
            options.device,
            options.path,
            options.lean,
            options.clipping,
        )
        for name in ("standard", "flash")
    }
    for _ in range(options.steps + WARMUP):  # side by side, so that the machine's moods reach both
        for training in trainings.values():
            training.step()
    print_times(trainings, options)
    NotLaunched.launches.clear()
    profiles = {name: profiled(training, PROFILED) for name, training in trainings.items()}
    calls = {name: profile.total_calls // PROFILED for name, profile in profiles.items()}
    print(f"calls a step: {calls['standard']} in ordinary training, {calls['flash']} in flash clipping")
    launches = {name: count / PROFILED for name, count in sorted(NotLaunched.launches.items())}
    of_torch = {name: operators(training) for name, training in trainings.items()}
    print(f"operators a step: {of_torch['standard']} in ordinary training, {of_torch['flash']} in flash clipping")
    if launches:
        print(f"launches a step: {', '.join(f'{name} {count:g}' for name, count in launches.items())}")
    if options.profile:
        profiles["flash"].sort_stats("tottime").print_stats(45)


def print_times(trainings: dict[str, Training], options: argparse.Namespace) -> None:
    taps = sum(len(list(module.parameters(recurse=False))) > 0 for module in trainings["flash"].model.modules())
    print(f"{options.model}, {taps} layers, {options.device}: host ms a step, median (shortest) of {options.steps}")
    print(f"{'':10}" + "".join(f"{phase:>18}" for phase in PHASES))
    for name, training in trainings.items():
        times = [training.times[phase][WARMUP:] for phase in PHASES]
        print(f"{name:10}" + "".join(f"{statistics.median(t):10.2f} ({min(t):5.2f})" for t in times))
    more = {
        phase: min(trainings["flash"].times[phase][WARMUP:]) - min(trainings["standard"].times[phase][WARMUP:])
        for phase in PHASES
    }
    each = ", ".join(f"{phase} {ms:.2f} ms ({1e3 * ms / taps:.1f} µs a layer)" for phase, ms in more.items())
    print(f"more in flash clipping: {each}; together {sum(more.values()):.2f} ms")


if __name__ == "__main__":
    main()
