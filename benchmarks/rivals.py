"""Who costs what: private training of four models by every engine, and the Trainer against a plain private loop.

    python benchmarks/rivals.py OUT [--tiny] [--parts rivals,trainer] [--budget 280]

`rivals`: a step by Opacus (flat, ghost, functorch), fastDP, opake and flash clipping, beside ordinary training; the
median of 7 steps after 5, and the peak of allocated memory above what was there before. Each model is a process of its
own, opake last in it, because its patches stay. Engines that are not installed are left out, and said so.
`trainer`: LoRA of a 1.2B Llama in bf16 through `dpscope.transformers.PrivateTrainer`, whole steps, against the same
steps in a loop that calls the engine itself; draws have the expected size in both, and the clock is looked at after
blocks of five steps, because training does not wait for the device.

Writes OUT/rivals.json and OUT/trainer.json, and prints both as tables. Whether each engine is exact: `dpscope check`.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch

WARMUP, STEPS = 5, 7
# fastDP cannot run under autocast: it has ordinary training in its own number format beside it.
METHODS = (
    *(("standard", "bf16"), ("flash", "bf16"), ("ghost", "bf16"), ("flat", "bf16"), ("functorch", "bf16")),
    *(("standard", "tf32"), ("fastdp", "tf32"), ("opake", "bf16")),
)
LORA = "r=16,alpha=32,target=q_proj,v_proj"
# name -> (preset, tiny preset, LoRA, batch, length)
WORKLOADS = {
    "llama-lora": ("hf:llama", "hf:llama-tiny", LORA, 8, 512),
    "gpt2": ("hf:gpt2", "hf:gpt2-tiny", None, 16, 512),
    "vit": ("hf:vit", "hf:vit-tiny", None, 32, None),
    "decoder": ("1b", "tiny", None, 4, 1024),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def synchronise() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def clean() -> float:
    """Free what can be freed; return the bytes that stay."""
    gc.collect()
    if DEVICE != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return float(torch.cuda.memory_allocated())


def timed(step: Any, warmup: int, steps: int) -> list[float]:
    """Return milliseconds of each of `steps` steps."""
    times = []
    for number in range(warmup + steps):
        synchronise()
        start = time.perf_counter()
        step()
        synchronise()
        if number >= warmup:
            times.append(1e3 * (time.perf_counter() - start))
    return times


def config_of(workload: str, *, tiny: bool) -> Any:
    from dpscope.workloads.configs import make_config, parse_lora, with_lora

    preset, tiny_preset, lora, *_ = WORKLOADS[workload]
    config = make_config(tiny_preset if tiny else preset)
    return config if lora is None else with_lora(config, parse_lora(lora))


def measure_method(method: str, dtype: str, workload: str, *, tiny: bool) -> dict[str, Any]:
    from dpscope.runner.assembly import assemble
    from dpscope.runner.spec import RunSpec

    *_, batch, length = WORKLOADS[workload]
    spec = RunSpec(
        workload=config_of(workload, tiny=tiny),
        method=method,
        instrument="time",
        batch_size=2 if tiny else batch,
        seq_len=None if length is None else 16 if tiny else length,
        dtype=dtype if DEVICE == "cuda" or dtype != "tf32" else "fp32",
        device=DEVICE,
    )
    before = clean()
    trainer, batches = assemble(spec)
    timed(lambda: trainer.train_step(*batches), WARMUP, 0)
    if method == "flash":
        trainer.engine.rehearsals.schedule.pause()
    times = timed(lambda: trainer.train_step(*batches), 0, STEPS)
    peak = torch.cuda.max_memory_allocated() - before if DEVICE == "cuda" else 0.0
    return {"ms": statistics.median(times), "times": times, "peak_gb": peak / 1e9, "status": "ok"}


def measure_workload(
    workload: str, out: Path, *, tiny: bool, deadline: float, names: Sequence[str] | None = None
) -> None:
    """Measure all methods in this process; what is done is written after each."""
    rows = {}
    for method, dtype in METHODS:
        if names is not None and method not in names:
            continue
        name = f"{method} {dtype}"
        if time.time() > deadline:
            rows[name] = {"status": "skipped", "reason": "the time was over"}
        else:
            try:
                rows[name] = measure_method(method, dtype, workload, tiny=tiny)
            except torch.OutOfMemoryError:
                rows[name] = {"status": "oom"}
            except Exception as error:
                rows[name] = {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}
        (out / f"rivals-{workload}.json").write_text(json.dumps(rows, indent=1))
        clean()


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "?"


def environment() -> dict[str, str]:
    names = ("torch", "triton", "transformers", "peft", "accelerate", "opacus")
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    return {"device": device, **{name: version_of(name) for name in names}}


# -- the Trainer -------------------------------------------------------------------------------------------------------


def llama_with_lora(*, tiny: bool) -> Any:
    from dpscope.workloads.workload import build_workload

    torch.manual_seed(0)
    with torch.device(DEVICE):
        return build_workload(config_of("llama-lora", tiny=tiny), batch_size=1, seq_len=16).model()


def token_data(model: Any, samples: int, length: int) -> list[dict[str, Any]]:
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (samples, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


BLOCK, BLOCKS = 5, 4  # steps between two looks at the clock, as training has none, and how many of those


def trainer_times(out: Path, *, logical: int, physical: int, length: int, tiny: bool) -> list[float]:
    """Return milliseconds a step of each block."""
    from transformers import TrainerCallback, TrainingArguments

    from dpscope.transformers import PrivateTrainer

    class Clock(TrainerCallback):
        """Looks at the clock after the warm-up, and after each block."""

        ends: ClassVar[list[float]] = []

        def on_step_end(self, args: Any, state: Any, *rest: Any, **also: Any) -> None:
            trainer._optimizer.engine.rehearsals.schedule.pause()
            if state.global_step >= WARMUP and (state.global_step - WARMUP) % BLOCK == 0:
                synchronise()
                self.ends.append(time.perf_counter())

    steps = WARMUP + BLOCK * BLOCKS
    Clock.ends.clear()
    model = llama_with_lora(tiny=tiny)
    args = TrainingArguments(
        output_dir=str(out / "run"),
        max_steps=steps,
        per_device_train_batch_size=physical,
        gradient_accumulation_steps=logical // physical,
        bf16=True,
        learning_rate=1e-4,
        logging_steps=500,  # the default
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
    )
    trainer = PrivateTrainer(
        model=model,
        args=args,
        train_dataset=token_data(model, logical * steps, length),
        callbacks=[Clock()],
        noise_multiplier=1.0,
        target_delta=1e-6,
    )
    same_size(trainer, logical)
    trainer.train()
    return [1e3 * (b - a) / BLOCK for a, b in pairwise(Clock.ends)]


def same_size(trainer: Any, logical: int) -> None:
    """Have every draw the expected size, for the comparison: the next samples in order instead of random ones."""
    make_private = trainer._make_private

    class Ordered:
        def __len__(self) -> int:
            return len(trainer.train_dataset) // logical

        def __iter__(self) -> Iterator[list[int]]:
            yield from (list(range(start, start + logical)) for start in range(0, len(trainer.train_dataset), logical))

    def and_order(*given: Any) -> None:
        make_private(*given)
        trainer._loader.batch_sampler.sampler = Ordered()

    trainer._make_private = and_order


def loop_times(*, logical: int, physical: int, length: int, tiny: bool) -> list[float]:
    from dpscope.flash import PrivacyEngine
    from dpscope.transformers.losses import sample_losses

    model = llama_with_lora(tiny=tiny).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    data = token_data(model, logical, length)
    loader = torch.utils.data.DataLoader(data, batch_size=logical)
    model, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.AdamW(trained, lr=1e-4, fused=DEVICE == "cuda"),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    ids = torch.stack([row["input_ids"] for row in data]).to(DEVICE)

    def step() -> None:
        parts = ids.split(physical)
        for number, part in enumerate(parts, 1):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                outputs = model(input_ids=part)
            sample_losses(model, outputs, part).mean().backward()
            if number < len(parts):
                optimizer.signal_skip_step(do_skip=True)
            optimizer.step()

    times = []
    for block in range(-1, BLOCKS):
        synchronise()
        start = time.perf_counter()
        for _ in range(WARMUP if block < 0 else BLOCK):
            step()
        synchronise()
        times.append(1e3 * (time.perf_counter() - start) / BLOCK)
        optimizer.engine.rehearsals.schedule.pause()
    return times[1:]


def measure_trainer(out: Path, *, tiny: bool) -> list[dict[str, Any]]:
    rows = []
    length = 16 if tiny else 512
    for logical, physical in ((8, 8), (32, 8)):
        sizes = {"logical": logical, "physical": physical, "length": length}
        clean()
        loop = loop_times(**sizes, tiny=tiny)
        clean()
        inside = trainer_times(out, **sizes, tiny=tiny)
        ratio = statistics.median(inside) / statistics.median(loop)
        rows.append({**sizes, "loop_ms": loop, "trainer_ms": inside, "ratio": ratio})
        (out / "trainer.json").write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))
    return rows


# -- all of it ---------------------------------------------------------------------------------------------------------


def run_part(out: Path, *arguments: str) -> None:
    command = [sys.executable, __file__, str(out), *arguments]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    (out / f"{'-'.join(word.strip('-') for word in arguments[:2])}.log").write_text(ended.stdout)
    if ended.returncode:
        print(f"{' '.join(arguments)} ended with {ended.returncode}:\n{ended.stdout[-1500:]}")


def show(out: Path) -> None:
    rows = {}
    for workload, (preset, _, lora, batch, length) in WORKLOADS.items():
        file = out / f"rivals-{workload}.json"
        if not file.exists():
            continue
        rows[workload] = found = json.loads(file.read_text())
        size = f"batch {batch}" + (f" × {length}" if length else "")
        print(f"\n{preset}{' LoRA' if lora else ''}, {size}")
        for name, row in found.items():
            if row["status"] == "ok":
                base = found.get(f"standard {name.split()[1]}", {})
                against = f"{row['ms'] / base['ms']:6.2f}×" if base.get("status") == "ok" else ""
                print(f"  {name:15} {row['ms']:9.1f} ms {against} {row['peak_gb']:7.1f} GB")
            else:
                print(f"  {name:15} {row['status']}: {row.get('reason', '')[:150]}")
    (out / "rivals.json").write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))
    if (out / "trainer.json").exists():
        print("\nLoRA of a 1.2B Llama, bf16, whole steps")
        for row in json.loads((out / "trainer.json").read_text())["rows"]:
            loop, inside = (statistics.median(row[key]) for key in ("loop_ms", "trainer_ms"))
            size = f"{row['logical']} samples × {row['length']} in batches of {row['physical']}"
            print(f"  {size}: plain loop {loop:.1f} ms, private Trainer {inside:.1f} ms, {row['ratio']:.3f}×")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, which prove nothing but that it runs")
    parser.add_argument("--parts", default="trainer,rivals")
    parser.add_argument("--budget", type=float, default=280.0, help="seconds after which no further row is begun")
    parser.add_argument("--methods", help="of those that are measured, these alone: opake,standard")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.only == "trainer":
        measure_trainer(asked.out, tiny=asked.tiny)
        return
    if asked.only:
        names = asked.methods.split(",") if asked.methods else None
        measure_workload(asked.only, asked.out, tiny=asked.tiny, deadline=asked.deadline, names=names)
        return
    deadline = asked.deadline or time.time() + asked.budget
    more = ["--deadline", str(deadline), *(["--tiny"] if asked.tiny else [])]
    more += ["--methods", asked.methods] if asked.methods else []
    parts = asked.parts.split(",")
    if "trainer" in parts:
        run_part(asked.out, "--only", "trainer", *more)
    for workload in WORKLOADS if "rivals" in parts else ():
        run_part(asked.out, "--only", workload, *more)
    show(asked.out)


if __name__ == "__main__":
    main()
