"""How far `dpscope plan` is from what a GPU measures, over configurations drawn by a seed.

    python benchmarks/plan_accuracy.py predict OUT --seed S    anywhere: every row            -> OUT/predicted.json
    python benchmarks/plan_accuracy.py measure OUT --seed S    GPU: rows, probes, batches     -> OUT/measured.json
    python benchmarks/plan_accuracy.py report OUT              every row, misses, summary     -> OUT/report.md

Rows are measured one after the other in one process, with everything freed in between; a row that fails says why and
the next one goes on. `measure` stops beginning new work when --minutes are over.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import make_config, parse_lora, with_lora

GIB = 2**30
LORA = "r=16,target=q_proj,k_proj,v_proj,o_proj"
# name -> (model, sizes, LoRA, weight of a sample in tokens of the draw, lengths)
MODELS: dict[str, tuple[str, dict[str, int], bool, tuple[int, ...]]] = {
    "decoder-512": ("small", {}, False, (64, 128, 256, 512, 1024, 2048)),
    "decoder-1024": (
        "1b",
        {"hidden_dim": 1024, "num_layers": 12, "num_heads": 16},
        False,
        (64, 128, 256, 512, 1024, 2048),
    ),
    "decoder-2048": ("1b", {"num_layers": 12}, False, (128, 256, 512, 1024, 2048, 4096)),
    "gpt2": ("hf:gpt2", {}, False, (64, 128, 256, 512, 1024)),
    "llama": ("hf:llama", {"num_layers": 8}, False, (128, 256, 512, 1024, 2048)),
    "llama-lora": ("hf:llama", {}, True, (128, 256, 512, 1024, 2048)),
    "bert": ("hf:bert", {}, False, (64, 128, 256, 512)),
    "vit": ("hf:vit", {}, False, ()),
    "resnet18": ("resnet18", {}, False, ()),
    "resnet50": ("resnet50", {}, False, ()),
}
TIED = ("gpt2", "llama")  # ghost clipping refuses tied weights
TOKENS = {"fp32": (1024, 8192), "tf32": (1024, 16384), "bf16": (1024, 24576)}
IMAGES = {"fp32": (4, 48), "tf32": (4, 64), "bf16": (4, 96)}


def draw(seed: int, rows: int) -> list[RunSpec]:
    """Every model and method in turn, everything else at random."""
    chance = random.Random(seed)
    specs: list[RunSpec] = []
    names = list(MODELS)
    while len(specs) < rows:
        name = names[len(specs) % len(names)]
        method = chance.choice(("standard", "flat", "ghost", "flash", "flash"))
        if method == "ghost" and name in TIED:
            method = "flash"
        specs.append(_draw_row(chance, name, method))
    return specs


def _draw_row(chance: random.Random, name: str, method: str) -> RunSpec:
    model, sizes, lora, lengths = MODELS[name]
    dtype = chance.choice(("fp32", "tf32", "bf16", "bf16"))
    config = make_config(model, **sizes)
    config = with_lora(config, parse_lora(LORA)) if lora else config
    if lengths:
        length: int | None = chance.choice(lengths)
        least, most = TOKENS[dtype]
        batch = max(2, round(math.exp(chance.uniform(math.log(least), math.log(most))) / (length or 1)))
    else:
        length, (least, most) = None, IMAGES[dtype]
        batch = round(math.exp(chance.uniform(math.log(least), math.log(most))))
    if method == "flat" and name in ("decoder-2048", "llama"):
        batch = min(batch, 16)  # per-sample gradients of 0.7 billion parameters
    checkpointed = method in ("standard", "flash") and chance.random() < 0.35
    lean = method == "flash" and chance.random() < 0.3
    return RunSpec(
        workload=config,
        method=method,
        dtype=dtype,
        batch_size=batch,
        seq_len=length,
        device="cuda",
        checkpoint_blocks=checkpointed,
        memory_budget="lean" if lean else "auto",
    )


def limited(seed: int, specs: list[RunSpec], count: int) -> list[tuple[int, float]]:
    """Rows whose largest batch is looked for, each on a card of so many GiB."""
    chance = random.Random(seed + 1)
    fitting = [number for number, spec in enumerate(specs) if spec.dtype != "fp32"]
    return [(number, chance.choice((24, 40, 80))) for number in chance.sample(fitting, min(count, len(fitting)))]


# -- predictions -------------------------------------------------------------------------------------------------------


def _accelerate(spec: RunSpec) -> int | None:
    """What Accelerate's estimate-memory says of training the model with Adam: weights, gradients and states."""
    import torch
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    from dpscope.workloads.workload import build_workload

    with torch.device("meta"):
        model = build_workload(spec.workload, batch_size=2, seq_len=spec.seq_len).model()
    total, _ = calculate_maximum_sizes(model)
    usage = estimate_training_usage(total, "bfloat16" if spec.dtype == "bf16" else "float32")
    return int(max(usage.values()))


def predict_largest(specs: list[RunSpec], card: Any, seed: int, searches: int) -> list[dict[str, Any]]:
    from dpscope.forecast.fitting import largest_batch

    found = []
    for number, gib in limited(seed, specs, searches):
        try:
            fit = largest_batch(specs[number], card, 20_000, lambda line: None, limit=int(gib * GIB))
            found.append({"number": number, "gib": gib, "largest": fit.batch})
        except Exception as error:
            found.append({"number": number, "gib": gib, "error": f"{type(error).__name__}: {str(error)[:200]}"})
        print(found[-1], flush=True)
    return found


def predict(out: Path, specs: list[RunSpec], seed: int, card_name: str, searches: int) -> None:
    from dpscope.forecast.cards import find_card
    from dpscope.forecast.step import forecast_step

    card = find_card(card_name)
    rows = []
    for number, spec in enumerate(specs):
        begin = time.time()
        row: dict[str, Any] = {"number": number, "label": spec.label}
        try:
            row |= dataclasses.asdict(forecast_step(spec, card))
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        if spec.batch_size >= 8 and "seconds" in row:  # the larger probe's: by how much it is off, the row is
            row["half_seconds"] = forecast_step(
                dataclasses.replace(spec, batch_size=spec.batch_size // 2), card
            ).seconds
        if spec.method == "standard":
            row["accelerate_bytes"] = _accelerate(spec)
        row["took"] = round(time.time() - begin, 1)
        rows.append(row)
        print(
            f"{number:3} {spec.label:60} {row.get('peak_bytes', 0) / GIB:8.2f} GiB {row.get('error', '')}", flush=True
        )
        _write(out / "predicted.json", {"seed": seed, "card": card.name, "rows": rows, "largest": []})
    largest = predict_largest(specs, card, seed, searches)
    _write(out / "predicted.json", {"seed": seed, "card": card.name, "rows": rows, "largest": largest})


# -- measurements ------------------------------------------------------------------------------------------------------


class Measurement:
    """What was measured so far, written after every row."""

    def __init__(self, out: Path, specs: list[RunSpec], seed: int, minutes: float) -> None:
        self.out, self.specs, self.seed, self.seconds = out, specs, seed, 60 * minutes
        self.begin = time.time()
        self.rows: list[dict[str, Any]] = []
        self.largest: list[dict[str, Any]] = []

    def is_over(self, share: float) -> bool:
        """Whether this share of the time is spent."""
        return time.time() - self.begin > share * self.seconds

    def save(self) -> None:
        import torch

        about = {"seed": self.seed, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        found = {"seconds": time.time() - self.begin, "rows": self.rows, "largest": self.largest}
        _write(self.out / "measured.json", {**about, **found})

    def measure_rows(self) -> None:
        from dpscope.forecast.probe import free_memory, probe

        for number, spec in enumerate(self.specs):
            if self.is_over(0.5):
                break
            row: dict[str, Any] = {"number": number, "label": spec.label, "method": spec.method}
            self.rows.append(row)
            started = time.time()
            try:
                found = probe(spec)
                row |= {
                    "peak_bytes": found.peak_bytes + found.rounding,
                    "seconds": found.seconds,
                    "phases": found.phases,
                }
                row["reserved_bytes"] = _reserved()
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
                traceback.print_exc()
            free_memory()
            row["took"] = round(time.time() - started, 1)
            figures = f"{row.get('peak_bytes', 0) / GIB:8.2f} GiB {1e3 * row.get('seconds', 0):8.1f} ms"
            print(f"{number:3} {spec.label:60} {figures}", flush=True)
            self.save()

    def probe_rows(self) -> None:
        """What probes at a quarter and at half of the batch say of it."""
        from dpscope.forecast.probe import extrapolate, free_memory, probe

        for row, spec in zip(self.rows, self.specs, strict=False):
            if self.is_over(0.72):
                break
            if spec.batch_size < 8 or "peak_bytes" not in row:
                continue
            sizes = (spec.batch_size // 4 + 1, spec.batch_size // 2)
            try:
                points = [probe(dataclasses.replace(spec, batch_size=size)) for size in sizes]
                row["probes"] = [dataclasses.asdict(point) for point in points]
                row["probed"] = dataclasses.asdict(extrapolate(points, spec.batch_size))
            except Exception as error:
                row["probe_error"] = f"{type(error).__name__}: {str(error)[:300]}"
            free_memory()
            self.save()

    def search(self, searches: int) -> None:
        from dpscope.forecast.probe import free_memory

        for number, gib in limited(self.seed, self.specs, searches):
            row = self.rows[number] if number < len(self.rows) else {}
            if self.is_over(0.95) or "probed" not in row:
                continue
            try:
                found = _largest(self.specs[number], gib, row, self.begin + self.seconds)
                self.largest.append(found | {"number": number})
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error)[:300]}"
                self.largest.append({"number": number, "gib": gib, "error": reason})
            free_memory()
            self.save()


def measure(out: Path, specs: list[RunSpec], seed: int, minutes: float, searches: int) -> None:
    found = Measurement(out, specs, seed, minutes)
    found.measure_rows()
    found.probe_rows()
    _measure_ordinary(specs, found.rows, found.begin + 0.77 * found.seconds)
    found.save()
    found.search(searches)
    probed = sum("probed" in row for row in found.rows)
    seconds = time.time() - found.begin
    print(f"{len(found.rows)} rows, {probed} probed, {len(found.largest)} searches, {seconds:.0f} s")


def _reserved() -> int:
    import torch

    return int(torch.cuda.memory_stats()["reserved_bytes.all.peak"])


def _largest(spec: RunSpec, gib: float, row: dict[str, Any], until: float) -> dict[str, Any]:
    """The largest batch that trains on a card of so many GiB, by steps of 4% around what the probes say."""
    import torch

    from dpscope.forecast.probe import Probe, extrapolate, free_memory

    points = [Probe(**each) for each in row["probes"]]
    total = torch.cuda.get_device_properties(0).total_memory
    limit = gib * GIB
    batch = max(2, max((b for b in range(2, 20000) if extrapolate(points, b).peak_bytes <= 0.97 * limit), default=2))
    tried: dict[int, bool] = {}

    def fits(size: int) -> bool:
        if size not in tried:
            torch.cuda.set_per_process_memory_fraction(limit / total)
            try:
                _train(dataclasses.replace(spec, batch_size=size))
                tried[size] = True
            except torch.OutOfMemoryError:
                tried[size] = False
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0)
                free_memory()
        return tried[size]

    def larger(size: int) -> int:
        return max(size + 1, round(size * 1.04))

    def smaller(size: int) -> int:
        return min(size - 1, round(size / 1.04))

    good = fits(batch)
    while time.time() < until and batch > 1:
        other = larger(batch) if good else smaller(batch)
        if other < 1 or fits(other) != good:
            break
        batch = other
    fitting = [size for size, fit in tried.items() if fit]
    failing = [size for size, fit in tried.items() if not fit]
    return {"gib": gib, "largest": max(fitting, default=0), "smallest_failing": min(failing, default=0), "tried": tried}


def _train(spec: RunSpec) -> None:
    from dpscope.runner.steps import TrainingSteps

    training = TrainingSteps(spec, warmup=3)
    training.warm_up()


def _measure_ordinary(specs: list[RunSpec], rows: list[dict[str, Any]], until: float) -> None:
    """What torch's MemTracker says of ordinary rows."""
    for spec, row in zip(specs, rows, strict=False):
        if spec.method == "standard" and "peak_bytes" in row and time.time() < until:
            try:
                row["memtracker_bytes"] = _memtracker(spec)
            except Exception as error:
                row["memtracker_error"] = f"{type(error).__name__}: {str(error)[:200]}"


def _memtracker(spec: RunSpec) -> int:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from dpscope.runner.assembly import assemble

    with FakeTensorMode():
        trainer, batches = assemble(spec)
        tracker = MemTracker()
        tracker.track_external(
            trainer.model, trainer.optimizer, *batches[0].values() if isinstance(batches[0], dict) else batches[0]
        )
        with tracker:
            trainer.train_step(*batches)
            tracker.reset_mod_stats()
            trainer.train_step(*batches)
        peak = tracker.get_tracker_snapshot("peak")
    return int(next(value["Total"] for device, value in peak.items() if torch.device(device).type == "cuda"))


# -- report ------------------------------------------------------------------------------------------------------------


def _error(predicted: float, measured: float) -> float:
    return predicted / measured - 1


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def report(out: Path) -> None:
    predicted = json.loads((out / "predicted.json").read_text())
    measured = json.loads((out / "measured.json").read_text())
    by_number = {row["number"]: row for row in predicted["rows"]}
    lines = [
        f"Seed {measured['seed']}, {measured['gpu']}, torch {measured['torch']}.",
        "",
        "| # | configuration | measured GiB | predicted | error | probed | measured ms | predicted | error | probed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    errors: dict[str, list[float]] = {"peak": [], "probed peak": [], "time": [], "probed time": []}
    for row in measured["rows"]:
        guess = by_number.get(row["number"], {})
        if "peak_bytes" not in row or "peak_bytes" not in guess:
            lines.append(f"| {row['number']} | {row['label']} | {row.get('error', '')} | {guess.get('error', '')} |")
            continue
        peak, seconds = _error(guess["peak_bytes"], row["peak_bytes"]), _error(guess["seconds"], row["seconds"])
        errors["peak"].append(peak)
        errors["time"].append(seconds)
        probed = ["", ""]
        if "probed" in row:
            scaled = row["probed"]["seconds"]
            if "half_seconds" in guess:
                scaled = row["probes"][-1]["seconds"] * guess["seconds"] / guess["half_seconds"]
            pair = [_error(row["probed"]["peak_bytes"], row["peak_bytes"]), _error(scaled, row["seconds"])]
            errors["probed peak"].append(pair[0])
            errors["probed time"].append(pair[1])
            probed = [f"{each:+.1%}" for each in pair]
        cells = [
            *(str(row["number"]), row["label"], f"{row['peak_bytes'] / GIB:.2f}", f"{guess['peak_bytes'] / GIB:.2f}"),
            *(f"{peak:+.1%}", probed[0], f"{1e3 * row['seconds']:.1f}", f"{1e3 * guess['seconds']:.1f}"),
            *(f"{seconds:+.1%}", probed[1]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for name, found in errors.items():
        sizes = [abs(each) for each in found]
        if sizes:
            below = sum(each < -0.03 for each in found) / len(found)
            lines.append(
                f"- {name}: {len(sizes)} rows, median {statistics.median(sizes):.2%}, 95th percentile "
                f"{_quantile(sizes, 0.95):.2%}, worst {max(sizes):.2%}, more than 3% below {below:.0%}"
            )
    lines += ["", *_largest_lines(predicted, measured)]
    for row in measured["rows"]:
        if row["method"] != "standard" or "peak_bytes" not in row:
            continue
        others = {
            "MemTracker": row.get("memtracker_bytes"),
            "Accelerate": by_number[row["number"]].get("accelerate_bytes"),
        }
        said = ", ".join(f"{name} {_error(size, row['peak_bytes']):+.1%}" for name, size in others.items() if size)
        ours = _error(by_number[row["number"]]["peak_bytes"], row["peak_bytes"])
        lines.append(f"- {row['number']} {row['label']}: plan {ours:+.1%}, {said or row.get('memtracker_error')}")
    (out / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _largest_lines(predicted: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """Largest batches: true, predicted, and whether they are within one step of 4%."""
    guesses = {(each["number"], each["gib"]): each.get("largest") for each in predicted.get("largest", [])}
    lines = []
    near = []
    for row in measured["largest"]:
        guess = guesses.get((row["number"], row["gib"]))
        label = measured["rows"][row["number"]]["label"]
        if not row.get("largest") or not guess:
            lines.append(f"- largest batch of {label} on {row['gib']} GiB: {row.get('largest')}, predicted {guess}")
            continue
        # The true one lies between what trained and what did not.
        low, high = row["largest"], max(row["largest"], row["smallest_failing"] - 1)
        near.append(low / 1.04 - 1 <= guess <= max(high * 1.04, high + 1))
        lines.append(f"- largest batch of {label} on {row['gib']} GiB: {low} to {high}, predicted {guess}")
    return [*lines, f"- largest batches within a step of 4%: {sum(near)} of {len(near)}"]


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("predict", "measure", "report"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=44)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--searches", type=int, default=10)
    parser.add_argument("--card", default="h200")
    given = parser.parse_args()
    if given.stage == "report":
        report(given.out)
        return
    specs = draw(given.seed, given.rows)
    if given.stage == "predict":
        predict(given.out, specs, given.seed, given.card, given.searches)
    else:
        measure(given.out, specs, given.seed, given.minutes, given.searches)


if __name__ == "__main__":
    main()
