"""Are dpscope's rows honest? The same model in the loop anybody would write, for `standard` and for `flash`.

python benchmarks/hand_written_loop.py RESULTS_DIR    # next to every such row of a sweep: agree, or exit code 1
python benchmarks/hand_written_loop.py --batch-size 8 --seq-len 1024 --hidden-dim 2048 --num-layers 20 --dtype bf16
python benchmarks/hand_written_loop.py --model hf:llama-8b --lora r=16,target=all-linear --param-dtype bf16 \\
    --dtype bf16 --batch-size 4 --seq-len 1024 --checkpoint-blocks --accumulate 2
python benchmarks/hand_written_loop.py --batch-size 8 --seq-len 256 --compile reduce-overhead

Of dpscope it uses the models and random batches of its workloads and, for `flash`, `dpscope.flash.PrivacyEngine`:
no runner, trainer or instrument. Times agree within 3 %, peaks (CUDA alone) within 1 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dpscope.errors import UserError
from dpscope.flash import PrivacyEngine
from dpscope.results.store import ResultStore
from dpscope.runner.spec import RunSpec
from dpscope.workloads.built_in import SimpleBigModel
from dpscope.workloads.configs import MODEL_SIZES, make_config, parse_lora, with_lora
from dpscope.workloads.workload import build_workload

METHODS = ("standard", "flash")
TIME_TOLERANCE, PEAK_TOLERANCE = 0.03, 0.01


def checkpointed_forward(model: SimpleBigModel) -> Callable[[Tensor], Tensor]:
    """SimpleBigModel's forward, with each block in a checkpoint."""

    def forward(tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
        x = model.tokens(tokens) + model.positions(positions)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits: Tensor = model.head(model.norm(x))
        return logits

    return forward


def build(spec: RunSpec) -> tuple[nn.Module, list[Any]]:
    """The model and the batches of a step."""
    workload = build_workload(spec.workload, batch_size=spec.batch_size, seq_len=spec.seq_len)
    torch.manual_seed(spec.seed)
    torch.set_default_dtype(torch.bfloat16 if spec.param_dtype == "bf16" else torch.float32)
    try:
        with torch.device(spec.device):
            model = workload.model()
    finally:
        torch.set_default_dtype(torch.float32)
    if spec.checkpoint_blocks:
        if isinstance(model, SimpleBigModel):
            model.forward = checkpointed_forward(model)  # type: ignore[method-assign]
        elif hasattr(model, "gradient_checkpointing_enable"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            raise UserError(f"no checkpoints were written by hand for {type(model).__name__}")
    if spec.compile != "none":
        torch._dynamo.reset()  # graphs of another shape would make this one's sizes dynamic
        model = torch.compile(model, mode=None if spec.compile == "default" else spec.compile)
    return model, [workload.batch(spec.seed + place, torch.device(spec.device)) for place in range(spec.accumulate)]


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of all tokens, or of all images."""
    if isinstance(batch, dict):
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        labels = batch["labels"]
    else:
        inputs, labels = batch
        logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def make_private(model: nn.Module, optimizer: Any, spec: RunSpec) -> Any:
    """The optimizer of flash clipping; its loader is there for the number of samples in a step alone."""
    samples, budget = spec.batch_size * spec.accumulate, spec.memory_budget
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    _, private, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(torch.zeros(samples)), batch_size=samples),
        noise_multiplier=spec.noise_multiplier,
        max_grad_norm=spec.max_grad_norm,
        poisson_sampling=False,
        memory_budget=None if budget == "auto" else budget if budget == "lean" else 2**30 * float(budget),
    )
    return private


def step_of(spec: RunSpec) -> Callable[[], None]:
    """One step of the loop, as a function."""
    model, batches = build(spec)
    fused = {"fused": True} if spec.device == "cuda" else {}
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[spec.optimizer]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = kind(trained, lr=spec.learning_rate, **fused)
    private = spec.method == "flash"
    if private:
        optimizer = make_private(model, optimizer, spec)
    autocast = torch.autocast(spec.device, torch.bfloat16) if spec.dtype == "bf16" else nullcontext()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for place, batch in enumerate(batches, start=1):
            with autocast:
                loss = mean_loss(model, batch)
            if private:
                loss.backward()
                if place < len(batches):  # as Opacus's BatchMemoryManager
                    optimizer.signal_skip_step(do_skip=True)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
            else:
                (loss / len(batches) if len(batches) > 1 else loss).backward()
        optimizer.step()

    return step


def measure(spec: RunSpec) -> dict[str, Any]:
    """Milliseconds of each step, one after the other as in training, and the peak of allocated memory on CUDA."""
    torch.set_float32_matmul_precision("high" if spec.dtype == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = spec.dtype == "tf32"
    step = step_of(spec)
    for _ in range(spec.warmup):
        step()
    times = cuda_times(step, spec.steps) if spec.device == "cuda" else cpu_times(step, spec.steps)
    peak = torch.cuda.max_memory_allocated() if spec.device == "cuda" else None
    del step
    gc.collect()
    if spec.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return {"method": spec.method, "label": spec.label, "median_ms": statistics.median(times), "peak": peak} | {
        "least_ms": min(times),
        "most_ms": max(times),
    }


def cuda_times(step: Callable[[], None], steps: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def cpu_times(step: Callable[[], None], steps: int) -> list[float]:
    marks = [time.perf_counter()]
    for _ in range(steps):
        step()
        marks.append(time.perf_counter())
    return [1e3 * (b - a) for a, b in pairwise(marks)]


def describe(found: dict[str, Any]) -> str:
    peak = "" if found["peak"] is None else f", {found['peak'] / 2**30:.3f} GiB"
    spread = f"{found['least_ms']:.1f}–{found['most_ms']:.1f}"
    return f"{found['label']}: by hand {found['median_ms']:.2f} ms ({spread}){peak}"


def compare_with_rows(folder: Path) -> list[dict[str, Any]]:
    """Every row of time of a sweep next to the loop; a record each."""
    records = []
    for result in ResultStore(folder).read_all()[0].values():
        if result.instrument != "time" or result.experiment not in METHODS or not result.ok:
            continue
        found = measure(RunSpec.from_dict(result.spec))
        ratios = {"time_ratio": result.timing["median_ms"] / found["median_ms"]}
        if found["peak"] is not None:
            ratios["peak_ratio"] = result.memory["peak_allocated_bytes"] / found["peak"]
        agrees = abs(ratios["time_ratio"] - 1) <= TIME_TOLERANCE
        agrees &= abs(ratios.get("peak_ratio", 1) - 1) <= PEAK_TOLERANCE
        records.append({**found, **ratios, "agrees": agrees})
        told = ", ".join(f"{name.partition('_')[0]} {ratio:.3f}" for name, ratio in ratios.items())
        print(f"{describe(found)}; dpscope/by hand: {told}: {'agrees' if agrees else 'DISAGREES'}", flush=True)
    if not records:
        raise UserError(f"{folder} holds no row of time of {' or '.join(METHODS)} that is ok")
    return records


def measure_shape(given: argparse.Namespace, tell: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """The methods at the shape of the flags, next to each other."""
    config = make_config(given.model, **{name: getattr(given, name) for name in MODEL_SIZES})
    config = config if given.lora is None else with_lora(config, parse_lora(given.lora))
    names = ("batch_size", "seq_len", "dtype", "param_dtype", "optimizer", "checkpoint_blocks", "accumulate")
    names += ("memory_budget", "compile", "warmup", "steps", "device")
    records = []
    for method in given.methods.split(","):
        if method not in METHODS:
            raise UserError(f"no loop was written by hand for {method!r}: choose from {', '.join(METHODS)}")
        spec = RunSpec(workload=config, method=method, **{name: getattr(given, name) for name in names})
        records.append(measure(spec))
        tell(describe(records[-1]))
    first = records[0]
    for record in records[1:]:
        peak = "" if record["peak"] is None else f", {record['peak'] / first['peak']:.2f}× the peak"
        tell(f"{record['method']} takes {record['median_ms'] / first['median_ms']:.2f}× the time{peak}")
    return records


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", metavar="RESULTS_DIR", help="the --out of a `dpscope compare`")
    parser.add_argument("--json", type=Path, help="write all figures here, too")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument(
        "--model", default="1b", help="a preset; its sizes are changed by the flags of `dpscope compare`"
    )
    for name in MODEL_SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--lora", help="r=16,target=all-linear")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--param-dtype", default="fp32")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--checkpoint-blocks", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--memory-budget", default="auto", help="of flash clipping: auto, lean, or GiB")
    parser.add_argument("--compile", default="none", help="the mode of torch.compile: default, reduce-overhead, …")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def main(arguments: list[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    try:
        records = measure_shape(given) if given.folder is None else compare_with_rows(given.folder)
    except UserError as error:
        parser().error(str(error))
    if given.json:
        given.json.write_text(json.dumps(records, indent=1) + "\n")
    return 0 if all(record.get("agrees", True) for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
