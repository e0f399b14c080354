"""Who costs what: private training of four models by every engine, eager and compiled; first the Trainer's overhead.

    python benchmarks/rivals.py OUT [--budget 235] [--tiny]

1. `private_trainer.py`: the private Trainer against a plain private loop.
2. One process for each model, and one more for each model with opake, whose patches of transformers stay. All compile
   at the same time, while nothing is measured.
3. One process after the other measures its cells. A method alternates with ordinary training, block by block: the
   ratio is the median over pairs of blocks, its spread the smallest and the largest. opake is measured alone, and
   compared with ordinary training of the same run. Peaks are of clear steps: the first ones, in which flash clipping
   verifies the model, are over.

Results are written to OUT as each cell ends, and printed as a table. Engines that are not installed are left out, and
said so. Whether each engine is exact: `dpscope check`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
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
OPAKE_CELLS = {
    "opake": Cell("opake", "none", "standard", "opake", ""),
    "opake compiled": Cell("opake", "default", "standard compiled", "opake, compiled", ""),
}
ALL_CELLS = CELLS | OPAKE_CELLS
JOBS = {
    **{name: (name, CELLS) for name in ROWS[:-1]},
    **{f"{name}-opake": (name, OPAKE_CELLS) for name in ROWS[:-1]},
    "decoder": ("decoder", CELLS),  # the largest last: by then the memory of the others is free
    "decoder-opake": ("decoder", OPAKE_CELLS),
}
PAIRS, BLOCK_MS = 5, 120.0
COMPILING = 90.0  # seconds for all of it, at most
TO_COMPILE = 40.0  # seconds for one model, about: none is begun with less left


# -- one model, in its own process -------------------------------------------------------------------------------------


class Job:
    """The cells of one model: loops that are built once, and figures that are written as they come."""

    def __init__(self, out: Path, name: str, *, tiny: bool) -> None:
        row, self.cells = JOBS[name]
        self.row: Row = headline.ROWS[row]
        self.out, self.name, self.tiny = out, name, tiny
        self.loops: dict[str, tuple[Loop, int]] = {}  # with the bytes that each holds between steps
        self.figures: dict[str, dict[str, Any]] = {}

    def compile(self, until: float) -> None:
        """Build and compile the loops of compiled cells. Others do so at the same time: memory may be short for now."""
        for key in self.compiled():
            while time.time() < until:
                if (found := self._attempt(key)) is None or found["status"] != "oom":
                    break
                time.sleep(2)

    def compiled(self) -> list[str]:
        return [key for key, cell in self.cells.items() if cell.compile != "none"]

    def measure(self, until: float) -> None:
        for key in self.cells:
            if key in self.figures and self.figures[key]["status"] != "oom":
                continue  # it failed to compile
            compiles = key in self.compiled() and key not in self.loops
            if time.time() + (TO_COMPILE if compiles else 0) > until:
                self.write(key, {"status": "not measured", "reason": "the time budget was spent"})
                continue
            failed = self._attempt(key)
            self.write(key, failed or self._figure(key))
            self._drop(key)

    def _attempt(self, key: str) -> dict[str, Any] | None:
        """Build the loop of a cell if it is not there; return why there is none."""
        from dpscope.errors import UserError

        if key in self.loops:
            return None
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
        self.figures[key] = found
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


def run_job(out: Path, name: str, *, tiny: bool, until: float, compiling: float) -> None:
    for slow in ("transformers", "dpscope.runner.assembly", "dpscope.trainers.flash", "torch._inductor"):
        importlib.import_module(slow)  # while the Trainer does so, too: nothing is measured yet
    job = Job(out, name, tiny=tiny)
    wait_for(out / "compile")
    job.compile(time.time() + compiling - TO_COMPILE)
    (out / f"{name}.ready").touch()
    wait_for(out / f"{name}.go")
    job.measure(until)


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.05)


# -- all of it ---------------------------------------------------------------------------------------------------------


def start(out: Path, *arguments: str) -> subprocess.Popen[bytes]:
    log = (out / f"{arguments[-1]}.log").open("wb")
    return subprocess.Popen([sys.executable, *arguments[:-1]], stdout=log, stderr=subprocess.STDOUT)


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for a process, and kill it when its time is over: what it has measured is written."""
    try:
        process.wait(max(seconds, 1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_all(out: Path, names: list[str], *, tiny: bool, budget: float, compiling: float) -> None:
    folder, deadline = Path(__file__).parent, time.time() + budget
    more = ["--tiny"] if tiny else []
    trainer = start(out, str(folder / "private_trainer.py"), str(out), *more, "trainer")
    common = [__file__, str(out), *more, "--until", str(deadline - 3)]
    timed = ["--compiling", str(compiling)]
    jobs = {name: start(out, *common, *timed, "--job", name, name) for name in names}
    end(trainer, deadline - time.time())
    (out / "compile").touch()
    compiled = time.time() + compiling
    while time.time() < compiled and not all(
        (out / f"{name}.ready").exists() or job.poll() is not None for name, job in jobs.items()
    ):
        time.sleep(0.1)
    for name, job in jobs.items():
        if not (out / f"{name}.ready").exists():
            ended = "" if job.poll() is None else f", it ended with {job.returncode}"
            print(f"{name} did not compile in time{ended}: it does so in its turn", flush=True)
            end(job, 1)
            jobs[name] = start(out, *common, "--compiling", "0", "--job", name, name)
    for name, job in jobs.items():
        (out / f"{name}.go").touch()
        end(job, deadline - time.time())


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
    parser.add_argument("--budget", type=float, default=235.0, help="seconds after which no further cell is begun")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--compiling", type=float, default=COMPILING, help="seconds for all models to compile")
    parser.add_argument("--only", default=",".join(ROWS), help="models: %(default)s")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.job:
        run_job(asked.out, asked.job, tiny=asked.tiny, until=asked.until, compiling=asked.compiling)
        return
    for stale in (*asked.out.glob("*.ready"), *asked.out.glob("*.go"), asked.out / "compile"):
        stale.unlink(missing_ok=True)
    rows = [name for name in ROWS if name in asked.only.split(",")]
    names = [name for name, (row, _) in JOBS.items() if row in rows]
    run_all(asked.out, names, tiny=asked.tiny, budget=asked.budget, compiling=asked.compiling)
    show(asked.out, rows)


if __name__ == "__main__":
    main()
