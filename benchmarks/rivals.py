"""What private training costs: seven models by Opacus and flash clipping, or four models by every engine.

    python benchmarks/rivals.py OUT --headline [--budget 180]   # the README's table: eager steps, and as CUDA graphs
    python benchmarks/rivals.py OUT [--budget 480]              # every engine, and the private Trainer's overhead
    python benchmarks/rivals.py OUT --smoke     # tiny models, everything at once: does each cell run on this machine?

Of every engine:

1. Eager cells.
2. Compiled cells.
3. `private_trainer.py`: the private Trainer next to a plain private loop.
4. opake, whose patches of transformers stay.

Each model has a process of its own. All processes of a phase prepare at the same time: they build models, verify them
and compile. Then they are measured in turn.

Nothing else runs while a cell is measured. A method alternates with the one it is compared with, block by block: the
ratio is the median over pairs of blocks, its spread the smallest and the largest. Where both cannot be in one process
(opake; compiled against eager), the ratio is that of the medians. Peaks are of clear steps: the first ones, in which
flash clipping verifies the model, are over.

OUT/headline.json, or OUT/engines.json, has every cell as it ends; the pages are made of both by `headline.py`.
OUT/logs.tar has the output of each process. `dpscope check` tells which engine is exact.
"""

from __future__ import annotations

import os

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for a GPU leaves forked processes able to use it
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # of each process that compiles

import argparse
import contextlib
import importlib
import json
import math
import multiprocessing
import statistics
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import private_trainer
import torch
from rows import CELLS, ROWS, Loop, device_name, fill_workspaces, free, versions

BLOCK_MS = 150.0
PAIRS, PAIRS_OF_FLASH = 5, 8
CELL_SECONDS = 8.0  # of measured blocks; slow cells have fewer pairs
NO_GPU_AFTER_FORK = 7
IMPORTED = (
    *("transformers", "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"),
    *("transformers.models.vit.modeling_vit", "transformers.trainer", "peft", "opacus", "torch._inductor"),
    *("dpscope.runner.steps", "dpscope.trainers.flash", "dpscope.trainers.opacus", "dpscope.transformers.trainer"),
)


class Job(NamedTuple):
    """Cells of one model that share a process, and those of them that are built before it is measured."""

    row: str
    cells: tuple[str, ...]
    prepared: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.row}-{self.cells[0].replace(' ', '-')}"


class Phase(NamedTuple):
    """Jobs that are measured in turn, and the shares of the budget by which they are ready and have ended."""

    jobs: tuple[Job, ...]
    ready: float
    until: float


ENGINE_ROWS = ("llama-lora", "gpt2", "vit", "decoder")  # of docs/engines.md
EAGER, MORE_EAGER = ("standard", "flash", "flat", "ghost"), ("functorch", "standard tf32", "fastdp tf32")
GRAPHED = ("standard graphed", "flash graphed")
TRAINER = Job("trainer", ("trainer",))
LARGE = ("llama-lora", "decoder")  # whose graphs are not in memory beside those of others


def eager(row: str) -> Job:
    return Job(row, EAGER + MORE_EAGER, EAGER[:2])


def graphed(row: str) -> Job:
    return Job(row, EAGER + GRAPHED, EAGER[:2] if row in LARGE else EAGER[:2] + GRAPHED)


def whole(rows: Iterable[str], *cells: str) -> tuple[Job, ...]:
    return tuple(Job(row, cells, cells) for row in rows)


PHASES = (
    Phase(tuple(map(eager, ENGINE_ROWS)), 0.15, 0.42),
    Phase(whole(ENGINE_ROWS, "standard compiled", "flash compiled"), 0.67, 0.74),
    Phase((TRAINER,), 0.74, 0.86),
    Phase(whole(ENGINE_ROWS, "opake"), 0.89, 0.95),
    Phase(whole(ENGINE_ROWS, "opake compiled"), 0.98, 1.0),
)
HEADLINE = (
    Phase(tuple(graphed(row) for row in ROWS if row not in LARGE), 0.35, 0.7),
    Phase(tuple(map(graphed, LARGE)), 0.85, 1.0),
)


# -- one process -------------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """What a process and its parent tell each other: it is ready, its turn has come, and when that ends."""

    ready: Any
    come: Any
    until: Any


class Measuring:
    """The cells of one model in this process: loops that are built once, and figures that are written as they come."""

    def __init__(self, job: Job, out: Path, *, tiny: bool) -> None:
        self.job, self.out, self.tiny = job, out, tiny
        self.loops: dict[str, Loop] = {}
        self.ready: dict[str, float] = {}
        self.figures: dict[str, dict[str, Any]] = {}

    def run(self, turn: Turn) -> None:
        for key in self.job.prepared:
            self.build(key)
        turn.ready.set()
        turn.come.wait()
        for key in self.job.cells:
            if time.time() > turn.until.value:
                self.write(key, {"status": "not measured", "reason": "the time budget was spent"})
            elif key in self.loops or (key not in self.figures and self.build(key)):
                self.write(key, self.attempt(key))
            self._drop(key)

    def build(self, key: str) -> bool:
        start = time.time()
        try:
            try:
                self.loops[key] = Loop(ROWS[self.job.row], CELLS[key], tiny=self.tiny)
            except torch.OutOfMemoryError:
                if key not in self.job.prepared:
                    raise
                free()
                time.sleep(15)  # models that are built at the same time need less between their steps
                self.loops[key] = Loop(ROWS[self.job.row], CELLS[key], tiny=self.tiny)
        except Exception as error:
            self.write(key, why_not(error))
            return False
        self.ready[key] = time.time() - start
        print(f"{key} ready after {self.ready[key]:.1f} s", flush=True)
        return True

    def attempt(self, key: str) -> dict[str, Any]:
        try:
            return self.figure(key)
        except Exception as error:
            return why_not(error)

    def figure(self, key: str) -> dict[str, Any]:
        loop, base = self.loops[key], self.loops.get(CELLS[key].base or "")
        found = {"status": "ok", "peak_bytes": loop.peak(), "ready_seconds": round(self.ready[key], 1)}
        pairs = PAIRS_OF_FLASH if CELLS[key].method == "flash" else PAIRS
        blocks = alternating([loop] if base is None else [loop, base], pairs=1 if self.tiny else pairs)
        found |= {"ms": statistics.median(blocks[0]), "blocks_ms": rounded(blocks[0])}
        if base is None:
            return found
        ratios = [own / ordinary for own, ordinary in zip(*blocks, strict=True)]
        return found | {
            "base_ms": statistics.median(blocks[1]),
            "base_blocks_ms": rounded(blocks[1]),
            "time_ratio": statistics.median(ratios),
            "least_ratio": min(ratios),
            "most_ratio": max(ratios),
        }

    def _drop(self, key: str) -> None:
        """Free a loop that no later cell is compared with."""
        later = self.job.cells[self.job.cells.index(key) + 1 :]
        if key not in {CELLS[each].base for each in later}:
            self.loops.pop(key, None)
        free()

    def write(self, key: str, figure: dict[str, Any]) -> None:
        self.figures[key] = figure
        part = {"device": device_name(), "row": self.job.row, "cells": self.figures}
        write_whole(self.out / f"{self.job.name}.json", part)
        print(f"{key}: {figure['status']} {figure.get('ms', figure.get('reason'))}", flush=True)


def write_whole(file: Path, what: dict[str, Any]) -> None:
    """Write a file that another process reads at any time."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(what, indent=1) + "\n", encoding="utf-8")
    new.replace(file)


def why_not(error: Exception) -> dict[str, Any]:
    """Return the status of a cell that failed, and the first line of the reason."""
    from dpscope.errors import UserError

    if isinstance(error, torch.OutOfMemoryError):
        return {"status": "oom", "reason": "out of GPU memory"}
    if not isinstance(error, UserError):
        traceback.print_exception(error)
    said = str(error).strip().splitlines() or [type(error).__name__]
    return {"status": "refused" if isinstance(error, UserError) else "failed", "reason": said[0][:300]}


def alternating(loops: list[Loop], *, pairs: int) -> list[list[float]]:
    """Return milliseconds a step of blocks in turn, each loop first every second time."""
    steps = [min(10, max(1, math.ceil(BLOCK_MS / loop.block(1)))) for loop in loops]
    times: list[list[float]] = [[] for _ in loops]
    start = time.time()
    while len(times[0]) < pairs and (len(times[0]) < 3 or time.time() - start < CELL_SECONDS):
        order = range(len(loops)) if len(times[0]) % 2 else reversed(range(len(loops)))
        for each in order:
            times[each].append(loops[each].block(steps[each]))
    return times


def rounded(times: Iterable[float]) -> list[float]:
    return [round(each, 3) for each in times]


def work(job: Job, out: Path, turn: Turn, *, tiny: bool) -> None:
    """Run a job in a process of its own, its output in a file of its own."""
    with (out / f"{job.name}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    warnings.filterwarnings("ignore")
    code = 0
    try:
        fill_workspaces()
    except RuntimeError:
        traceback.print_exc()
        os._exit(NO_GPU_AFTER_FORK)
    try:
        if job == TRAINER:
            turn.ready.set()
            turn.come.wait()
            private_trainer.measure(out, tiny=tiny, seconds=turn.until.value - time.time())
        else:
            Measuring(job, out, tiny=tiny).run(turn)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# -- all of it ---------------------------------------------------------------------------------------------------------


class Processes:
    """Processes forked from one that has imported everything; fresh ones where a forked process finds no GPU."""

    def __init__(self, out: Path, *, tiny: bool, command: str, phases: Sequence[Phase] = PHASES) -> None:
        self.out, self.tiny, self.command, self.phases = out, tiny, command, phases
        self.file = out / ("headline.json" if phases is HEADLINE else "engines.json")
        self.parts = Path(tempfile.mkdtemp())
        self.start = time.time()
        self.context: Any = multiprocessing.get_context("fork")
        self.forks = True

    def in_turn(self, jobs: tuple[Job, ...], ready: float, until: float) -> None:
        """Let all jobs prepare at the same time, until `ready` at most, then measure one after the other."""
        if not jobs or time.time() > ready:
            return
        begun = [(job, *self.begin(job)) for job in jobs]
        for _, process, turn in begun:
            while process.is_alive() and not turn.ready.is_set() and time.time() < ready:
                turn.ready.wait(0.2)
        if any(process.exitcode == NO_GPU_AFTER_FORK for _, process, _ in begun) and self.forks:
            self.context, self.forks = multiprocessing.get_context("spawn"), False
            self.in_turn(jobs, ready, until)
            return
        late = [process for _, process, turn in begun if not turn.ready.is_set()]
        for process in late:  # they would disturb the others
            process.kill()
        self.say(f"{len(jobs) - len(late)} of {len(jobs)} are ready")
        for number, (job, process, turn) in enumerate(begun):
            # A slow model may take the time that earlier ones have left, and none of the later ones'.
            share = min(1.0, 1.6 / (len(jobs) - number))
            self.measure(job, process, turn, time.time() + (until - time.time()) * share)

    def at_once(self, jobs: Iterable[Job], until: float) -> None:
        begun = [(job, *self.begin(job)) for job in jobs]
        for _, _, turn in begun:
            turn.until.value = until
            turn.come.set()
        for each in begun:
            self.measure(*each, until)

    def begin(self, job: Job) -> tuple[Any, Turn]:
        turn = Turn(self.context.Event(), self.context.Event(), self.context.Value("d", 0.0))
        process = self.context.Process(target=work, args=(job, self.parts, turn), kwargs={"tiny": self.tiny})
        process.start()
        return process, turn

    def measure(self, job: Job, process: Any, turn: Turn, until: float) -> None:
        """Let a process measure. Kill it when its time is over: what it has measured is written."""
        turn.until.value = until - 1
        turn.come.set()
        while process.is_alive() and time.time() < until + 4:
            process.join(2)
            self.write()
        if process.is_alive():
            process.kill()
            process.join(5)
        self.write()
        self.say(f"{job.name} ended with {process.exitcode}")

    def write(self) -> dict[str, Any]:
        """Write OUT's file from what all processes have written, and return what it says."""
        run = gathered(self.parts, self.command, self.phases)
        write_whole(self.file, run)
        return run

    def say(self, what: str) -> None:
        print(f"{time.time() - self.start:6.1f} s  {what}", flush=True)


def run_all(processes: Processes, rows: list[str], *, budget: float, smoke: bool) -> None:
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    processes.say("imported")
    chosen = [tuple(job for job in phase.jobs if job == TRAINER or job.row in rows) for phase in processes.phases]
    phases = list(zip(processes.phases, chosen, strict=True))
    if smoke:
        # opake takes minutes to compile
        whole = phases if processes.phases is HEADLINE else phases[:-1]
        processes.at_once((job for _, jobs in whole for job in jobs), processes.start + budget)
        return
    for phase, jobs in phases:
        processes.in_turn(jobs, *(processes.start + budget * share for share in (phase.ready, phase.until)))


def gathered(folder: Path, command: str, phases: Sequence[Phase] = PHASES) -> dict[str, Any]:
    """Return one run from the files of all processes."""
    parts = [json.loads(file.read_text()) for file in sorted(folder.glob("*-*.json"))]
    run: dict[str, Any] = {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "device": parts[0]["device"] if parts else "none",
        "versions": versions(),
        "rows": {},
    }
    for name, row in ROWS.items():
        known = {key: cell for part in parts if part["row"] == name for key, cell in part["cells"].items()}
        asked = [key for phase in phases for job in phase.jobs if job.row == name for key in job.cells]
        missing = {"status": "not measured", "reason": "its process ended before"}
        cells = {key: known.get(key, missing) for key in CELLS if key in asked}
        if cells:
            run["rows"][name] = {"label": row.label, "label_zh": row.label_zh, "cells": with_ratios(cells)}
    trainer = folder / "trainer.json"
    if trainer.exists():
        run["trainer"] = json.loads(trainer.read_text())
    return run


def with_ratios(cells: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return cells with the ratios to the cell that each is compared with, where both have figures."""
    for key, figure in cells.items():
        base = cells.get(CELLS[key].base or "", {})
        if figure["status"] == base.get("status") == "ok":
            figure.setdefault("time_ratio", figure["ms"] / base["ms"])
            if figure["peak_bytes"]:
                figure["peak_ratio"] = figure["peak_bytes"] / base["peak_bytes"]
    return cells


def describe(figure: dict[str, Any]) -> str:
    if figure["status"] != "ok":
        return f"{figure['status']}: {figure.get('reason', '')[:110]}"
    peak = "" if figure["peak_bytes"] is None else f"  {figure['peak_bytes'] / 2**30:6.1f} GiB"
    ratio = f"{figure['time_ratio']:6.2f}×" if "time_ratio" in figure else ""
    spread = f" ({figure['least_ratio']:.2f}–{figure['most_ratio']:.2f})" if "least_ratio" in figure else ""
    more = f", {figure['peak_ratio']:.2f}×" if "peak_ratio" in figure else ""
    return f"{figure['ms']:8.1f} ms {ratio}{spread}{peak}{more}, ready in {figure['ready_seconds']} s"


def show(run: dict[str, Any], rows: list[str]) -> None:
    for name in (name for name in rows if name in run["rows"]):
        print(f"\n{run['rows'][name]['label']}")
        for key, figure in run["rows"][name]["cells"].items():
            print(f"  {key:18} {describe(figure)}")
    if "trainer" in run:
        print("\nLoRA of a 1.2B Llama, bf16, inside the private Trainer")
        for each in run["trainer"]["rows"]:
            print(f"  {private_trainer.describe(each)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--headline", action="store_true", help="the cells of the README's table alone")
    parser.add_argument("--smoke", action="store_true", help="tiny models, all cells at once: figures mean nothing")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for all of it (default: %(default)g)")
    parser.add_argument("--only", default=",".join(ROWS), help="models: %(default)s")
    asked = parser.parse_args()
    rows = [name for name in ROWS if name in asked.only.split(",")]
    command = " ".join(["python benchmarks/rivals.py OUT", *sys.argv[2:]])
    asked.out.mkdir(parents=True, exist_ok=True)
    phases = HEADLINE if asked.headline else PHASES
    processes = Processes(asked.out, tiny=asked.smoke, command=command, phases=phases)
    run_all(processes, rows, budget=asked.budget, smoke=asked.smoke)
    show(processes.write(), rows)
    with tarfile.open(asked.out / "logs.tar", "w") as whole:
        for file in processes.parts.glob("*.log"):
            whole.add(file, arcname=file.name)


if __name__ == "__main__":
    main()
