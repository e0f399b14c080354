"""Who costs what: private training of four models by every engine, eager and compiled; first the Trainer's overhead.

    python benchmarks/rivals.py OUT [--budget 150] [--tiny]

1. `private_trainer.py`: the private Trainer against a plain private loop.
2. Eager cells: one process for each model, and one more for each model with opake, whose patches of transformers stay.
3. Compiled cells, as far as the time allows.

Nothing runs at the same time. Processes are forked from one that has imported everything. A method alternates with
ordinary training, block by block: the ratio is the median over pairs of blocks, its spread the smallest and the
largest. opake is measured alone, and compared with ordinary training of the same run. Peaks are of clear steps: the
first ones, in which flash clipping verifies the model, are over.

Results are written to OUT as each cell ends, and printed as a table; OUT/rivals.tar holds all files. If each engine is
exact, `dpscope check` tells.
"""

from __future__ import annotations

import os

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for a GPU leaves forked processes able to use it

import argparse
import contextlib
import gc
import importlib
import json
import math
import multiprocessing
import statistics
import subprocess
import sys
import tarfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import headline
import private_trainer
import torch
from headline import Cell, Loop, Row

ROWS = ("llama-lora", "gpt2", "vit", "decoder")
# fastDP cannot run under autocast: it has ordinary training in its own number format beside it. It replaces methods of
# Hugging Face's classes, and so comes last.
CELLS = {
    "standard": Cell("standard", "none", None, "ordinary training", ""),
    "flash": Cell("flash", "none", "standard", "flash clipping", ""),
    "standard compiled": Cell("standard", "default", None, "ordinary training, compiled", ""),
    "flash compiled": Cell("flash", "default", "standard compiled", "flash clipping, compiled", ""),
    "flat": Cell("flat", "none", "standard", "Opacus, hooks (`flat`)", ""),
    "ghost": Cell("ghost", "none", "standard", "Opacus, ghost clipping", ""),
    "functorch": Cell("functorch", "none", "standard", "Opacus, functorch", ""),
    "standard tf32": Cell("standard", "none", None, "ordinary training, TF32", "", "tf32"),
    "fastdp tf32": Cell("fastdp", "none", "standard tf32", "fastDP, TF32", "", "tf32"),
}
EAGER_OPAKE = {"opake": Cell("opake", "none", "standard", "opake", "")}
COMPILED_OPAKE = {"opake compiled": Cell("opake", "default", "standard compiled", "opake, compiled", "")}
ALL_CELLS = CELLS | EAGER_OPAKE | COMPILED_OPAKE
EAGER = {key: cell for key, cell in CELLS.items() if cell.compile == "none"}
COMPILED = {key: cell for key, cell in CELLS.items() if cell.compile != "none"}
JOBS = {
    **{f"{name}{also}": (name, cells) for name in ROWS for also, cells in (("", EAGER), ("-opake", EAGER_OPAKE))},
    **{f"{name}-compiled": (name, COMPILED) for name in ROWS},
    **{f"{name}-opake-compiled": (name, COMPILED_OPAKE) for name in ROWS},
}
PAIRS, BLOCK_MS = 5, 120.0
TO_COMPILE = 30.0  # seconds for one model, about: none is begun with less left
NO_GPU_AFTER_FORK = 7
IMPORTED = (
    *("transformers", "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"),
    *("transformers.models.vit.modeling_vit", "transformers.trainer", "peft", "opacus", "torch._inductor"),
    *("dpscope.runner.assembly", "dpscope.trainers.flash", "dpscope.trainers.opacus", "dpscope.transformers.trainer"),
)


# -- one model, in its own process -------------------------------------------------------------------------------------


class Job:
    """The cells of one model: loops that are built once, and figures that are written as they come."""

    def __init__(self, out: Path, name: str, *, tiny: bool) -> None:
        row, self.cells = JOBS[name]
        self.row: Row = headline.ROWS[row]
        self.out, self.name, self.tiny = out, name, tiny
        self.loops: dict[str, tuple[Loop, int]] = {}  # with the bytes that each holds between steps
        self.figures: dict[str, dict[str, Any]] = {}

    def measure(self, until: float) -> None:
        for key, cell in self.cells.items():
            if time.time() + (TO_COMPILE if cell.compile != "none" and not self.tiny else 0) > until:
                self.write(key, {"status": "not measured", "reason": "the time budget was spent"})
                continue
            failed = self._attempt(key)
            self.write(key, failed or self._figure(key))
            self._drop(key)

    def _attempt(self, key: str) -> dict[str, Any] | None:
        """Build the loop of a cell; return why there is none."""
        from dpscope.errors import UserError

        before = allocated()
        start = time.time()
        try:
            cell = self.cells[key]
            if self.tiny and cell.dtype == "tf32":
                cell = cell._replace(dtype="fp32")
            loop = Loop(self.row, cell, tiny=self.tiny)
        except torch.OutOfMemoryError:
            found = {"status": "oom", "reason": "out of GPU memory"}
        except Exception as error:
            status = "refused" if isinstance(error, UserError) else "failed"
            found = {"status": status, "reason": (str(error).strip().splitlines() or [type(error).__name__])[0][:300]}
        else:
            free()
            self.loops[key] = (loop, allocated() - before)
            print(f"{key} ready after {time.time() - start:.1f} s", flush=True)
            return None
        free()
        return found

    def _figure(self, key: str) -> dict[str, Any]:
        loop, held = self.loops[key]
        base = self.loops.get(self.cells[key].base or "")
        found: dict[str, Any] = {"status": "ok", "peak_bytes": peak_of(loop, held)}
        steps = steps_of(loop)
        if base is None:
            times = [loop.block(steps) for _ in range(PAIRS)]
            return found | {"ms": statistics.median(times), "times": times}
        base_steps = steps_of(base[0])
        pairs = [(base[0].block(base_steps), loop.block(steps)) for _ in range(PAIRS)]
        ratios = [own / ordinary for ordinary, own in pairs]
        return found | {
            "ms": statistics.median(own for _, own in pairs),
            "ratio": statistics.median(ratios),
            "least_ratio": min(ratios),
            "most_ratio": max(ratios),
            "pairs": pairs,
        }

    def _drop(self, key: str) -> None:
        """Free a loop that no later cell is compared with."""
        later = list(self.cells)[list(self.cells).index(key) + 1 :]
        if key not in {self.cells[each].base for each in later}:
            self.loops.pop(key, None)
        free()

    def write(self, key: str, figure: dict[str, Any]) -> None:
        self.figures[key] = figure
        (self.out / f"rivals-{self.name}.json").write_text(json.dumps(self.figures, indent=1))
        print(f"{key}: {figure['status']} {figure.get('ms', figure.get('reason'))}", flush=True)


def allocated() -> int:
    return torch.cuda.memory_allocated() if headline.device() == "cuda" else 0


def free() -> None:
    gc.collect()
    if headline.device() == "cuda":
        torch.cuda.empty_cache()


def steps_of(loop: Loop) -> int:
    return min(10, max(1, math.ceil(BLOCK_MS / loop.block(1))))


def peak_of(loop: Loop, held: int) -> int | None:
    """Return the peak of two clear steps of this loop alone, with what it holds between steps."""
    if headline.device() == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats()
    others = allocated() - held
    loop.block(2)
    return torch.cuda.max_memory_allocated() - others


def run_job(out: Path, name: str, *, tiny: bool, until: float) -> None:
    warnings.filterwarnings("ignore")
    if name == "trainer":
        private_trainer.measure(out, tiny=tiny)
    else:
        Job(out, name, tiny=tiny).measure(until)


# -- all of it ---------------------------------------------------------------------------------------------------------


def forked(out: Path, name: str, *, tiny: bool, until: float) -> None:
    """Run a job in a process that was forked, its output in a file of its own."""
    with (out / f"{name}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        if headline.device() == "cuda":
            torch.zeros(1, device="cuda")
    except RuntimeError:
        traceback.print_exc()
        os._exit(NO_GPU_AFTER_FORK)
    try:
        run_job(out, name, tiny=tiny, until=until)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def run_all(out: Path, names: list[str], *, tiny: bool, budget: float) -> None:
    deadline = time.time() + budget
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    print(f"imported after {time.time() - deadline + budget:.1f} s", flush=True)
    context, forks = multiprocessing.get_context("fork"), True
    for name in ("trainer", *names):
        if time.time() > deadline:
            break
        options: dict[str, Any] = {"tiny": tiny, "until": deadline - 3}
        if forks:
            process = context.Process(target=forked, args=(out, name), kwargs=options)
            process.start()
            end(process.join, process.is_alive, process.kill, deadline - time.time())
            forks = process.exitcode != NO_GPU_AFTER_FORK
        if not forks:
            command = [sys.executable, __file__, str(out), "--job", name, "--until", str(options["until"])]
            with (out / f"{name}.log").open("w") as log:
                fresh = subprocess.Popen([*command, *(["--tiny"] if tiny else [])], stdout=log, stderr=log)
            with contextlib.suppress(subprocess.TimeoutExpired):
                fresh.wait(max(1, deadline - time.time()))
            fresh.kill()
        print(f"{name} ended after {time.time() - deadline + budget:.1f} s", flush=True)


def end(join: Callable[[float], Any], is_alive: Callable[[], bool], kill: Callable[[], Any], seconds: float) -> None:
    """Wait for a process, and kill it when its time is over: what it has measured is written."""
    join(max(seconds, 1))
    if is_alive():
        kill()
        join(5)


def figures_of(out: Path, row: str) -> dict[str, dict[str, Any]]:
    """Return the cells of a model from the files of its processes, with ratios of time and memory."""
    found: dict[str, dict[str, Any]] = {}
    for name, (of, cells) in JOBS.items():
        file = out / f"rivals-{name}.json"
        missing = {"status": "not measured", "reason": "its process ended before"}
        known = json.loads(file.read_text()) if file.exists() else {}
        if of == row:
            found |= {key: known.get(key, missing) for key in cells}
    for key, figure in found.items():
        base = found.get(ALL_CELLS[key].base or "", {})
        if figure["status"] == base.get("status") == "ok":
            figure.setdefault("ratio", figure["ms"] / base["ms"])
            if figure["peak_bytes"]:
                figure["peak_ratio"] = figure["peak_bytes"] / base["peak_bytes"]
    return found


def describe(figure: dict[str, Any]) -> str:
    if figure["status"] != "ok":
        return f"{figure['status']}: {figure.get('reason', '')[:110]}"
    peak = "" if figure["peak_bytes"] is None else f"  {figure['peak_bytes'] / 2**30:6.1f} GiB"
    ratio = f"{figure['ratio']:6.2f}×" if "ratio" in figure else ""
    spread = f" ({figure['least_ratio']:.2f}–{figure['most_ratio']:.2f})" if "pairs" in figure else ""
    more = f", {figure['peak_ratio']:.2f}×" if "peak_ratio" in figure else ""
    return f"{figure['ms']:8.1f} ms {ratio}{spread}{peak}{more}"


def show(out: Path, names: list[str]) -> None:
    rows = {}
    for name in names:
        row = headline.ROWS[name]
        rows[name] = {"label": row.label, "cells": figures_of(out, name)}
        print(f"\n{row.label}")
        for key, figure in rows[name]["cells"].items():
            print(f"  {key:18} {describe(figure)}")
    run = {
        "date": time.strftime("%Y-%m-%d"),
        "device": headline.device_name(),
        "versions": headline.versions((*headline.PACKAGES, "opake")),
        "rows": rows,
    }
    (out / "rivals.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    if (out / "trainer.json").exists():
        print("\nLoRA of a 1.2B Llama, bf16, inside the private Trainer")
        for each in json.loads((out / "trainer.json").read_text())["rows"]:
            print(f"  {private_trainer.describe(each)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, which prove nothing but that it runs")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds after which no further cell is begun")
    parser.add_argument("--only", default=",".join(ROWS), help="models: %(default)s")
    parser.add_argument("--job", choices=["trainer", *JOBS], help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.job:
        run_job(asked.out, asked.job, tiny=asked.tiny, until=asked.until)
        return
    rows = [name for name in ROWS if name in asked.only.split(",")]
    names = [name for name, (row, _) in JOBS.items() if row in rows]
    run_all(asked.out, names, tiny=asked.tiny, budget=asked.budget)
    show(asked.out, rows)
    with tarfile.open(asked.out / "rivals.tar", "w") as whole:
        for file in (*asked.out.glob("*.json"), *asked.out.glob("*.log")):
            whole.add(file, arcname=file.name)


if __name__ == "__main__":
    main()
