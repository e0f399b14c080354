"""Is dpscope's `standard` row honest? The same model in the loop anybody would write, measured next to it.

python benchmarks/hand_written_loop.py RESULTS_DIR     # the --out folder of a `dpscope compare` on CUDA
"""

import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from dpscope.results.store import ResultStore
from dpscope.workloads.configs import config_from_dict
from dpscope.workloads.transformer import SimpleBigModel


def hand_written(spec: dict) -> tuple[float, int]:
    """Median milliseconds of a step, and peak allocated bytes."""
    torch.manual_seed(0)
    config = config_from_dict(spec["workload"])
    with torch.device("cuda"):
        model = SimpleBigModel(config)
        tokens = torch.randint(config.vocab_size, (spec["batch_size"], spec["seq_len"] + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times = []
    for step in range(spec["warmup"] + spec["steps"]):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=spec["dtype"] == "bf16"):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        end.record()
        torch.cuda.synchronize()
        if step >= spec["warmup"]:
            times.append(start.elapsed_time(end))
    return statistics.median(times), torch.cuda.max_memory_allocated()


def main() -> int:
    found, _ = ResultStore(Path(sys.argv[1])).read_all()
    agrees = True
    for result in found.values():
        if result.experiment != "standard" or not result.ok:
            continue
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        median, peak = hand_written(result.spec)
        time_ratio = result.timing["median_ms"] / median
        memory_ratio = result.memory["peak_allocated_bytes"] / peak
        good = abs(time_ratio - 1) <= 0.03 and abs(memory_ratio - 1) <= 0.01
        agrees &= good
        print(
            f"batch {result.spec['batch_size']}, sequence {result.spec['seq_len']}: by hand {median:.1f} ms, "
            f"{peak / 2**30:.3f} GiB; dpscope/by hand: time {time_ratio:.3f}, memory {memory_ratio:.4f}: "
            f"{'agrees' if good else 'DISAGREES'}"
        )
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
