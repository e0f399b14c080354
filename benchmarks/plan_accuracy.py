"""How far `dpscope plan` is from what a GPU measures, over configurations drawn by a seed.

    python benchmarks/plan_accuracy.py all OUT --seed S --budget SECONDS    GPU: everything below, in this order

    python benchmarks/plan_accuracy.py predict OUT --seed S    anywhere: every row            -> OUT/predicted.json
    python benchmarks/plan_accuracy.py measure OUT --seed S    GPU: rows, probes, batches     -> OUT/measured.json
    python benchmarks/plan_accuracy.py report OUT              every row, misses, summary     -> OUT/report.md

What OUT holds is not made again: a call that ended early goes on where it stopped, and predictions may be made before,
on a machine without a GPU. `--dry-run` takes predictions for measurements, to try all this without a GPU.

Largest batches are searched first, in several processes side by side, which also fill Triton's cache on disk with the
kernels of all rows. Rows follow, each alone on the GPU: its own steps, and those of a quarter and half of its batch,
from which `report` tells what a probed plan says. A row that fails says why and the next one goes on. Everything is
written after every row. Nothing begins after `--budget` seconds. 44 rows and 12 searches are expected to take 450 s on
an H200.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import make_config, parse_lora, with_lora

GIB = 2**30
ROOM = 125.0  # GiB of the GPU that are filled at a time
MOST_TRIALS = 8  # of a search for the largest batch
MARGIN = 0.02  # that a plan leaves free
SEARCHING = 0.25  # of the time, for all that runs side by side; what is left of it follows in another call
COMPILING_STEPS = 4  # flash clipping verifies the model in the first and in later ones
# Of the errors' sizes: median, 95th percentile; and the share of rows that are too low by more than the margin.
BARS = {
    "peak": (0.03, 0.08, 0.02),
    "probed peak": (0.01, 0.03, 0.02),
    "time": (0.15, None, None),
    "probed time": (0.05, None, None),
}
MACHINE = "import torch; print(torch.cuda.get_device_name(), 'torch', torch.__version__, sep=', ')"
Row = dict[str, Any]
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
    numbers = [number for number, spec in enumerate(specs) if spec.dtype != "fp32"]
    chance.shuffle(numbers)
    return [(number, chance.choice((24, 40, 80))) for number in numbers][:count]


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


def probe_sizes(spec: RunSpec) -> list[int]:
    """Sizes that are probed, at most half of the row's; none where that is too little to tell."""
    return [spec.batch_size // 4, spec.batch_size // 2] if spec.batch_size >= 4 else []


def predict_row(number: int, spec: RunSpec, card: Any) -> Row:
    from dpscope.forecast.step import forecast_step

    begin = time.time()
    row: Row = {"number": number, "label": spec.label}
    try:
        row |= dataclasses.asdict(forecast_step(spec, card))
        smaller = (dataclasses.replace(spec, batch_size=size) for size in probe_sizes(spec))
        row["smaller"] = [dataclasses.asdict(forecast_step(each, card, attributed=False)) for each in smaller]
        if spec.method == "standard":
            row["accelerate_bytes"] = _accelerate(spec)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    row["took"] = round(time.time() - begin, 1)
    print(f"{number:3} {spec.label:60} {row.get('peak_bytes', 0) / GIB:8.2f} GiB {row.get('error', '')}", flush=True)
    return row


def predict_largest(number: int, spec: RunSpec, gib: float, card: Any) -> Row:
    from dpscope.forecast.fitting import largest_batch

    try:
        fit = largest_batch(spec, card, 20_000, lambda line: None, limit=int(gib * GIB))
        found: Row = {"number": number, "gib": gib, "largest": fit.batch}
    except Exception as error:
        found = {"number": number, "gib": gib, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    print(found, flush=True)
    return found


def predict(out: Path, given: argparse.Namespace) -> None:
    from dpscope.forecast.cards import find_card

    card, specs = find_card(given.card), draw(given.seed, given.rows)
    written: Row = _kept(out / "predicted.json", given.seed) or {"seed": given.seed, "rows": [], "largest": []}
    written["card"] = card.name
    done = {row["number"] for row in written["rows"]}
    for number in range(len(specs)) if given.only is None else given.only:
        if number not in done and time.time() < given.until:
            written["rows"].append(predict_row(number, specs[number], card))
            _write(out / "predicted.json", written)
    looked_for = {(each["number"], each["gib"]) for each in written["largest"]}
    for number, gib in limited(given.seed, specs, given.searches):
        if (number, gib) not in looked_for and time.time() < given.until:
            written["largest"].append(predict_largest(number, specs[number], gib, card))
            _write(out / "predicted.json", written)


def _kept(path: Path, seed: int) -> Row:
    """What a call before has written for the same seed; nothing otherwise."""
    found: Row = json.loads(path.read_text()) if path.exists() else {}
    return found if found.get("seed") == seed else {}


# -- measurements ------------------------------------------------------------------------------------------------------


def measure_others(spec: RunSpec) -> Row:
    """What torch's MemTracker says of an ordinary row."""
    try:
        return {"memtracker_bytes": _memtracker(spec)}
    except Exception as error:
        return {"memtracker_error": f"{type(error).__name__}: {str(error)[:200]}"}


def compile_kernels(spec: RunSpec) -> Row:
    """Take a few steps of a row and of smaller ones, so that Triton's cache on disk holds their kernels."""
    from dpscope.forecast.probe import free_memory
    from dpscope.runner.steps import TrainingSteps

    for size in [*probe_sizes(spec), spec.batch_size]:
        TrainingSteps(dataclasses.replace(spec, batch_size=size), warmup=COMPILING_STEPS).warm_up()
        free_memory()
    return {}


def measure_row(spec: RunSpec) -> Row:
    """Steps of the row and of smaller ones, alone on the GPU."""
    from dpscope.forecast.probe import probe

    sizes = [*probe_sizes(spec), spec.batch_size]
    *probes, alone = probe([dataclasses.replace(spec, batch_size=size) for size in sizes])
    return {"alone": dataclasses.asdict(alone), "probes": list(map(dataclasses.asdict, probes))}


def measure_largest(spec: RunSpec, gib: float, guess: int) -> Row:
    """The largest batch that trains on a card of so many GiB, by steps of 4% from the predicted one."""
    import torch

    from dpscope.forecast.probe import free_memory
    from dpscope.runner.steps import TrainingSteps

    tried: dict[int, bool] = {}
    torch.cuda.set_per_process_memory_fraction(gib * GIB / torch.cuda.get_device_properties(0).total_memory)

    def fits(size: int) -> bool:
        if size not in tried:
            try:
                TrainingSteps(dataclasses.replace(spec, batch_size=size), warmup=4).warm_up()
                tried[size] = True
            except torch.OutOfMemoryError:
                tried[size] = False
            free_memory()
        return tried[size]

    batch = max(guess, 1)
    good = fits(batch)
    for _ in range(MOST_TRIALS):
        other = max(batch + 1, round(batch * 1.04)) if good else min(batch - 1, round(batch / 1.04))
        if other < 1 or fits(other) != good:
            break
        batch = other
    torch.cuda.set_per_process_memory_fraction(1.0)
    fitting = [size for size, fit in tried.items() if fit]
    failing = [size for size, fit in tried.items() if not fit]
    return {"largest": max(fitting, default=0), "smallest_failing": min(failing, default=0), "tried": tried}


MEASURING: dict[str, Callable[..., Row]] = {
    "compile": compile_kernels,
    "row": measure_row,
    "others": measure_others,
    "largest": measure_largest,
}


def _work(pipe: Connection) -> None:
    """Measure what is asked for, until nothing more is."""
    from dpscope.forecast.probe import free_memory

    while (asked := pipe.recv()) is not None:
        kind, arguments = asked
        begin = time.time()
        try:
            found = MEASURING[kind](*arguments)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            traceback.print_exc()
        free_memory()
        pipe.send({**found, "took": round(time.time() - begin, 1)})


@dataclasses.dataclass
class Task:
    kind: str
    row: Row  # where the figures go
    arguments: tuple[Any, ...]
    gib: float  # that it needs on the GPU


class Workers:
    """Processes that measure side by side, as many as the GPU has room for."""

    def __init__(self, save: Callable[[], None]) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._save = save
        self._idle: list[tuple[Any, Connection]] = []
        self._busy: dict[Connection, tuple[Any, Task]] = {}

    def run(self, tasks: list[Task], most: int, until: float) -> None:
        """Measure the tasks in order, `most` at a time; nothing begins after `until`."""
        waiting = list(tasks)
        while waiting or self._busy:
            room = ROOM - sum(task.gib for _, task in self._busy.values())
            ready = [task for task in waiting if task.gib <= room or not self._busy]
            if ready and len(self._busy) < most and time.time() < until:
                waiting.remove(ready[0])
                self._begin(ready[0])
            elif self._busy:
                for pipe in wait(list(self._busy)):
                    self._end(pipe)
            else:
                break

    def _begin(self, task: Task) -> None:
        if not self._idle:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._idle.append((process, ours))
        process, pipe = self._idle.pop()
        pipe.send((task.kind, task.arguments))
        self._busy[pipe] = process, task

    def _end(self, pipe: Any) -> None:
        process, task = self._busy.pop(pipe)
        try:
            task.row |= pipe.recv()
            self._idle.append((process, pipe))
        except EOFError:
            task.row["error"] = "its process ended"
        said = {name: value for name, value in task.row.items() if name not in ("probes", "label")}
        print(f"{task.kind:8}{task.row['label']:60} {said}", flush=True)
        self._save()

    def keep(self, most: int) -> None:
        """End idle processes but so many: each holds a context on the GPU."""
        ended, self._idle = self._idle[most:], self._idle[:most]
        for _, pipe in ended:
            pipe.send(None)
        for process, _ in ended:
            process.join()


def measure(out: Path, given: argparse.Namespace) -> None:
    begin = time.time()
    specs = draw(given.seed, given.rows)
    command = [sys.executable, "-c", "print('no GPU (dry run)')" if given.dry_run else MACHINE]
    machine = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    predicted = json.loads((out / "predicted.json").read_text())
    kept = _kept(out / "measured.json", given.seed)
    chosen = [row["number"] for row in predicted["rows"] if given.only is None or row["number"] in given.only]
    rows: dict[int, Row] = {n: {"number": n, "label": specs[n].label, "method": specs[n].method} for n in chosen}
    others: dict[int, Row] = {n: dict(row) for n, row in rows.items() if row["method"] == "standard"}
    searched = [each for each in predicted["largest"] if each.get("largest") and each["number"] in rows]
    largest = [{**rows[each["number"]], "gib": each["gib"]} for each in searched]
    for kind, found in (("rows", rows.values()), ("others", others.values()), ("largest", largest)):
        before = {(row["number"], row.get("gib")): row for row in kept.get(kind, []) if "took" in row}
        for row in found:
            row.update(before.get((row["number"], row.get("gib")), {}))

    def save() -> None:
        figures = {"rows": list(rows.values()), "others": list(others.values()), "largest": largest}
        seconds = kept.get("seconds", 0.0) + time.time() - begin
        _write(out / "measured.json", {"seed": given.seed, "machine": machine, "seconds": seconds, **figures})

    guesses = {row["number"]: row for row in predicted["rows"]}
    needs = {n: 2 + 1.2 * row.get("peak_bytes", 30 * GIB) / GIB for n, row in guesses.items()}
    kernels = {n: dict(row) for n, row in rows.items() if row["method"] == "flash" and "took" not in row}
    side_by_side = [
        *(
            Task("largest", row, (specs[each["number"]], each["gib"], each["largest"]), each["gib"] + 2)
            for row, each in zip(largest, searched, strict=True)
        ),
        *(Task("compile", row, (specs[n],), needs[n]) for n, row in kernels.items()),
        *(Task("others", row, (specs[n],), 1.0) for n, row in others.items()),
    ]
    alone = [Task("row", row, (specs[n],), needs[n]) for n, row in rows.items()]
    todo = [[task for task in tasks if "took" not in task.row] for tasks in (side_by_side, alone)]
    save()
    if given.dry_run:
        for task in (*todo[0], *todo[1]):
            task.row |= {**_pretended(task, guesses[task.row["number"]]), "took": 0.0}
        save()
    else:
        workers = Workers(save)
        workers.run(todo[0], given.workers, begin + SEARCHING * (given.until - begin))
        workers.keep(1)
        workers.run(todo[1], 1, given.until)
    done = [sum("took" in row for row in found) for found in (rows.values(), others.values(), largest)]
    print(f"{done} of {len(rows)} rows, {len(others)} others, {len(largest)} searches: {time.time() - begin:.0f} s")


def _pretended(task: Task, guess: Row) -> Row:
    """A measurement that is as predicted."""
    if task.kind in ("compile", "others") or "peak_bytes" not in guess:
        return {}
    if task.kind == "largest":
        return {"largest": task.arguments[2], "smallest_failing": task.arguments[2] + 1, "tried": {}}
    sizes = [*probe_sizes(task.arguments[0]), task.arguments[0].batch_size]
    names = ("peak_bytes", "seconds", "gpu_seconds")
    *probes, alone = (
        {"batch_size": size, **{name: step[name] for name in names}}
        for size, step in zip(sizes, [*guess["smaller"], guess], strict=True)
    )
    return {"alone": alone, "probes": probes}


def _memtracker(spec: RunSpec) -> int:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from dpscope.runner.steps import assemble

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


def _step(guess: Row) -> Any:
    from dpscope.forecast.step import StepForecast

    return StepForecast(**{field.name: guess[field.name] for field in dataclasses.fields(StepForecast)})


def _probed(guess: Row, times: Row, batch_size: int) -> Any:
    """What a plan with --probe says of the row from its smaller sizes; None without them."""
    from dpscope.forecast.probe import Correction, Probe

    if not times.get("probes") or "smaller" not in guess:
        return None
    step, *smaller = map(_step, (guess, *guess["smaller"]))
    return Correction([Probe(**each) for each in times["probes"]], smaller)(step, batch_size)


def _compare(spec: RunSpec, guess: Row, row: Row) -> dict[str, float]:
    """Errors of a row by what was predicted."""
    peak, seconds = row["alone"]["peak_bytes"], row["alone"]["seconds"]
    errors = {"peak": _error(guess["peak_bytes"], peak), "time": _error(guess["seconds"], seconds)}
    if (probed := _probed(guess, row, spec.batch_size)) is not None:
        errors["probed peak"] = _error(probed.peak_bytes, peak)
        errors["probed time"] = _error(probed.seconds, seconds)
    return errors


def report(out: Path) -> None:
    predicted = json.loads((out / "predicted.json").read_text())
    measured = json.loads((out / "measured.json").read_text())
    guesses = {row["number"]: row for row in predicted["rows"]}
    specs = draw(measured["seed"], max(guesses) + 1)
    lines = [
        f"Seed {measured['seed']}, {measured['machine']}.",
        "",
        "v: the predicted peak is that of flash clipping's verification, which is larger than a step's.",
        "",
        "| # | configuration | measured GiB | predicted | error | probed | measured ms | predicted | error | probed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    every: dict[str, list[float]] = {"peak": [], "probed peak": [], "time": [], "probed time": []}
    for row in sorted(measured["rows"], key=lambda each: each["number"]):
        number = row["number"]
        guess = guesses[number]
        if "alone" not in row or "peak_bytes" not in guess:
            why = row.get("error", "" if "took" in row else "not measured")
            lines.append(f"| {number} | {row['label']} | {why} | {guess.get('error', '')} |")
            continue
        alone = row["alone"]
        errors = _compare(specs[number], guess, row)
        for name, error in errors.items():
            every[name].append(error)
        said = {name: f"{errors[name]:+.1%}" if name in errors else "" for name in every}
        planned = f"{guess['peak_bytes'] / GIB:.2f}" + " v" * _step(guess).peaks_verifying
        cells = [
            *(str(number), row["label"], f"{alone['peak_bytes'] / GIB:.2f}", planned),
            *(said["peak"], said["probed peak"], f"{1e3 * alone['seconds']:.1f}", f"{1e3 * guess['seconds']:.1f}"),
            *(said["time"], said["probed time"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *_summary(every), "", *_largest_lines(predicted, measured), "", *_others(predicted, measured)]
    (out / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _summary(every: dict[str, list[float]]) -> Iterator[str]:
    for name, found in every.items():
        sizes = [abs(each) for each in found]
        if sizes:
            figures = {
                "median": statistics.median(sizes),
                "95th percentile": _quantile(sizes, 0.95),
                f"more than {MARGIN:.0%} below": sum(each < -MARGIN for each in found) / len(found),
            }
            judged = [
                f"{what} {figure:.2%}{_against(figure, bar)}"
                for (what, figure), bar in zip(figures.items(), BARS[name], strict=True)
            ]
            yield f"- {name}: {len(sizes)} rows, {', '.join(judged)}, worst {max(sizes):.2%}"


def _against(figure: float, bar: float | None) -> str:
    return "" if bar is None else f" (bar {bar:.0%}: {'met' if figure <= bar else 'missed'})"


def _others(predicted: Row, measured: Row) -> Iterator[str]:
    """Other planners on the ordinary rows."""
    guesses = {row["number"]: row for row in predicted["rows"]}
    peaks = {row["number"]: row["alone"]["peak_bytes"] for row in measured["rows"] if "alone" in row}
    for row in measured["others"]:
        if row["number"] not in peaks:
            continue
        guess, peak = guesses[row["number"]], peaks[row["number"]]
        others = {"MemTracker": row.get("memtracker_bytes"), "Accelerate": guess.get("accelerate_bytes")}
        said = [f"{name} {_error(size, peak):+.1%}" for name, size in others.items() if size]
        if "memtracker_error" in row:
            said.append(f"MemTracker: {row['memtracker_error'][:80]}")
        ours = _error(guess["peak_bytes"], peak)
        yield f"- {row['number']} {row['label']}: plan {ours:+.1%}, {', '.join(said)}"


def _largest_lines(predicted: Row, measured: Row) -> Iterator[str]:
    """Largest batches: true, predicted, and whether they are within one step of 4%."""
    guesses = {(each["number"], each["gib"]): each.get("largest") for each in predicted["largest"]}
    near = []
    for row in measured["largest"]:
        guess = guesses[row["number"], row["gib"]]
        where = f"- largest batch of {row['label']} on {row['gib']} GiB:"
        if not row.get("largest") or not row.get("smallest_failing"):
            if "took" in row:
                yield f"{where} {row.get('error', row.get('tried'))}, predicted {guess}"
            continue
        # The true one lies between what trained and what did not.
        low, high = row["largest"], row["smallest_failing"] - 1
        near.append(min(low / 1.04, low - 1) <= guess <= max(high * 1.04, high + 1))
        yield f"{where} {low} to {high}, predicted {guess}{'' if near[-1] else ' (missed)'}"
    yield f"- largest batches within a step of 4%: {sum(near)} of {len(near)}"


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1))


def _numbers(text: str) -> list[int]:
    return list(map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=("all", "predict", "measure", "report"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=44)
    parser.add_argument(
        "--budget", "--seconds", type=float, default=540.0, help="seconds after which nothing begins; 0: no limit"
    )
    parser.add_argument("--searches", type=int, default=12)
    parser.add_argument("--workers", type=int, default=12, help="processes side by side, where nothing is timed")
    parser.add_argument("--only", type=_numbers, help="rows to predict or measure [default: all]")
    parser.add_argument("--card", default="h200")
    parser.add_argument("--dry-run", action="store_true", help="take predictions for measurements")
    given = parser.parse_args()
    stages = ("predict", "measure") if given.stage == "all" else (given.stage,)
    begin = time.time()
    for number, stage in enumerate(stages):
        given.until = begin + (given.budget or math.inf) * (number + 1) / len(stages)  # half for predictions
        if stage != "report":
            {"predict": predict, "measure": measure}[stage](given.out, given)
    if given.stage != "predict":
        report(given.out)


if __name__ == "__main__":
    main()
