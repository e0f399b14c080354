"""Record two steps of a tiny model on a GPU as test data: a Chrome trace, and torch's own totals of it.

python benchmarks/record_trace_capture.py tests/data

Writes `cuda_step_trace.json.gz` and `cuda_step_trace.expected.json`. The step has everything that a reader of traces
has to find: a batch copied to the GPU, casts of autocast, backward kernels launched from autograd's own thread, a wait
for a value (`.item()`) in the phase `clip`. Folders of this machine are taken out of the names.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from dpscope.instruments.trace.capture import WAIT, export_trace, module_ranges
from dpscope.instruments.trace.events import read_trace
from dpscope.instruments.trace.summary import summarise
from dpscope.vocabulary.instruments import Schedule
from dpscope.vocabulary.phases import BACKWARD, CLIP, FORWARD, OPTIMIZER, listening, phase

NAME = "cuda_step_trace"
BATCH, FEATURES, STEPS = 64, 128, 2


class Step:
    """Ordinary training of two layers, with a value read in the middle."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, 8)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.batch = torch.randn(BATCH, FEATURES)

    def __call__(self) -> None:
        x = self.batch.to("cuda")
        with phase(FORWARD), torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.model(x).float().square().mean()
        with phase(BACKWARD):
            loss.backward()
        with phase(CLIP):
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.norm = norm.item()
        with phase(OPTIMIZER):
            self.optimizer.step()
            self.optimizer.zero_grad()


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/data")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{NAME}.json.gz"
    step = Step()
    schedule = Schedule(skip_first=3, active=STEPS)
    totals: dict[str, dict[str, float]] = {}

    def keep(profiler: profile) -> None:
        export_trace(profiler, path)
        for row in profiler.key_averages():
            totals[row.key] = {"count": row.count, "self_device_us": row.self_device_time_total}

    profiler = profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule.to_torch(),
        on_trace_ready=keep,
        record_shapes=True,
        profile_memory=True,
        with_stack=True,
    )
    with listening(record_function), module_ranges(step.model), profiler:
        for _ in range(schedule.steps):
            step()
            with record_function(WAIT):
                torch.cuda.synchronize()
            profiler.step()
    strip_folders(path)
    expected = folder / f"{NAME}.expected.json"
    expected.write_text(json.dumps({"torch": torch.__version__, "steps": STEPS, "totals": totals}, indent=1) + "\n")
    summary = summarise([read_trace(path)])
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB; {expected}")
    print(
        json.dumps({name: summary[name] for name in ("basis", "steps", "step_ms", "gpu", "phases", "copies")}, indent=1)
    )
    print(json.dumps(summary["synchronisations"], indent=1))


def strip_folders(path: Path) -> None:
    """Names of files stay, and the packages they belong to; the folders these lie in go."""
    text = gzip.decompress(path.read_bytes()).decode()
    text = re.sub(r'(?<=")/[^"\s]*/(?:site|dist)-packages/', "", text)
    text = re.sub(r'(?<=")/(?:[^/"\s]+/)+(?=[^/"\s]*\.py\()', "", text)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
