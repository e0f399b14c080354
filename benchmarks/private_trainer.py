"""Overhead of the private Trainer: LoRA of a 1.2B Llama inside `PrivateTrainer` against a plain private loop.

    python benchmarks/private_trainer.py OUT [--seconds 60] [--tiny]

Both models are in one process. Blocks of steps alternate, in the order Trainer, loop, loop, Trainer: the Trainer's
callback looks at the clock and lets the plain loop take its blocks. The ratio is the median over pairs of blocks, its
spread the quartiles. Draws have the expected size in both. Writes OUT/trainer.json after each size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rows import ROWS, device, device_name, free, synchronise, versions

WARMUP, BLOCK, PAIRS = 8, 3, 24  # steps, steps, and at most so many pairs; the first steps check the model
SIZES = ((8, 8), (32, 8))  # samples of a step, samples of a physical batch


def llama_with_lora(*, tiny: bool) -> Any:
    from dpscope.workloads.configs import make_config, parse_lora, with_lora
    from dpscope.workloads.workload import build_workload

    row = ROWS["llama-lora"]
    config = with_lora(make_config(row.tiny if tiny else row.model), parse_lora(row.lora or ""))
    torch.manual_seed(0)
    with torch.device(device()):
        return build_workload(config, batch_size=1, seq_len=16).model()


def token_data(model: Any, samples: int, length: int) -> list[dict[str, Any]]:
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (samples, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def plain_loop(*, logical: int, physical: int, length: int, tiny: bool) -> Callable[[int], float]:
    """Return a function that takes steps in a loop of its own, and returns milliseconds a step."""
    from dpscope.flash import PrivacyEngine
    from dpscope.transformers.steps import sample_losses

    where = device()
    model = llama_with_lora(tiny=tiny).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    data = token_data(model, logical, length)
    model, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.AdamW(trained, lr=1e-4, fused=where == "cuda"),
        data_loader=torch.utils.data.DataLoader(data, batch_size=logical),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    ids = torch.stack([row["input_ids"] for row in data]).to(where)

    def step() -> None:
        parts = ids.split(physical)
        for number, part in enumerate(parts, 1):
            optimizer.zero_grad()
            with torch.autocast(where, dtype=torch.bfloat16):
                outputs = model(input_ids=part, use_cache=False)
            sample_losses(model, outputs, part).mean().backward()
            if number < len(parts):
                optimizer.signal_skip_step(do_skip=True)
            optimizer.step()

    def block(steps: int) -> float:
        synchronise()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronise()
        return 1e3 * (time.perf_counter() - start) / steps

    block(WARMUP)
    optimizer.engine.verification.schedule.pause()
    return block


def pairs(
    out: Path, *, logical: int, physical: int, length: int, tiny: bool, until: float
) -> list[tuple[float, float]]:
    """Return milliseconds a step of each pair of blocks: in the plain loop, inside the Trainer."""
    from transformers import TrainerCallback, TrainingArguments

    from dpscope.transformers import PrivateTrainer

    loop = plain_loop(logical=logical, physical=physical, length=length, tiny=tiny)
    inside: list[float] = []
    plain: list[float] = []

    class Clock(TrainerCallback):
        """Looks at the clock after each block; blocks of the plain loop are outside of the time."""

        start: float

        def on_step_end(self, args: Any, state: Any, control: Any, **also: Any) -> None:
            since = state.global_step - WARMUP
            if since == 0:
                trainer._optimizer.engine.verification.schedule.pause()
            if since >= 0 and since % BLOCK == 0:
                synchronise()
                if since:
                    inside.append(1e3 * (time.perf_counter() - self.start) / BLOCK)
                if len(inside) % 2:
                    plain.extend([loop(BLOCK), loop(BLOCK)])
                elif len(inside) >= 4 and time.time() > until:
                    control.should_training_stop = True
                self.start = time.perf_counter()

    steps = WARMUP + BLOCK * PAIRS
    model = llama_with_lora(tiny=tiny)
    trainer = PrivateTrainer(
        model=model,
        args=TrainingArguments(
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
            use_cpu=device() == "cpu",
        ),
        train_dataset=token_data(model, logical * steps, length),
        callbacks=[Clock()],
        noise_multiplier=1.0,
        target_delta=1e-6,
    )
    have_equal_draws(trainer, logical)
    trainer.train()
    return list(zip(plain, inside, strict=False))


def have_equal_draws(trainer: Any, logical: int) -> None:
    """Give every draw the expected size, for the comparison: the next samples in order instead of random ones."""
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


def describe(row: dict[str, Any]) -> str:
    size = f"{row['logical']} samples × {row['length']} in batches of {row['physical']}"
    spread = f"{row['low_ratio']:.3f}–{row['high_ratio']:.3f}, {len(row['pairs'])} pairs"
    return f"{size}: loop {row['loop_ms']:.1f} ms, Trainer {row['trainer_ms']:.1f} ms, {row['ratio']:.3f}× ({spread})"


def measure(out: Path, *, tiny: bool, seconds: float = 60.0) -> None:
    rows: list[dict[str, Any]] = []
    start = time.time()
    for number, (logical, physical) in enumerate(SIZES, 1):
        sizes = {"logical": logical, "physical": physical, "length": 16 if tiny else 512}
        free()
        found = pairs(out, **sizes, tiny=tiny, until=start + seconds * number / len(SIZES))
        ratios = [inside / plain for plain, inside in found]
        low, _, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                **sizes,
                "loop_ms": statistics.median(plain for plain, _ in found),
                "trainer_ms": statistics.median(inside for _, inside in found),
                "ratio": statistics.median(ratios),
                "low_ratio": low,
                "high_ratio": high,
                "pairs": found,
            }
        )
        run = {
            "device": device_name(),
            "versions": versions(),
            "rows": rows,
        }
        (out / "trainer.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        print(describe(rows[-1]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, which prove nothing but that it runs")
    parser.add_argument("--seconds", type=float, default=60.0)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    asked.out.mkdir(parents=True, exist_ok=True)
    measure(asked.out, tiny=asked.tiny, seconds=asked.seconds)


if __name__ == "__main__":
    main()
