"""Steps of compilation: taken before warm-up, timed apart, and counted if they happen in measured steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from dpscope.instruments.timing import Progress
from dpscope.results.payloads.memory import CompilationPayload
from dpscope.results.schema import Note
from dpscope.trainers.compilation import CompileCounts, must_compile
from dpscope.trainers.graphed import forget_peak

SETTLED = 2  # steps in a row that compile nothing: CUDA graphs are recorded in the first of them
MOST_STEPS = 12  # a model that still compiles then compiles for ever
TOPIC = "compilation"


class Compilation:
    """Work of torch.compile for a row: seconds, graphs, and whether it continued while steps were measured."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0  # of the steps in which something was compiled
        self._first = self._before_measuring = CompileCounts.now()

    @classmethod
    def of(cls, step: Callable[[], None], device: str | None, progress: Progress) -> Compilation:
        """Take steps until two in a row compile nothing. `step` waits for the device, whose peak is forgotten."""
        compilation, settled = cls(), 0
        with must_compile():
            while settled < SETTLED and compilation.steps < MOST_STEPS:
                progress("compiling", compilation.steps, compilation.steps + SETTLED - settled)
                settled = 0 if compilation._compiles_in(step) else settled + 1
                if not settled and device is not None:
                    forget_peak(torch.device(device))  # autotuning tries kernels on tensors of its own
        compilation.begin_measuring()
        return compilation

    def begin_measuring(self) -> None:
        """Count what is compiled from here on as compiled during measured steps."""
        self._before_measuring = CompileCounts.now()

    def to_dict(self) -> CompilationPayload:
        found = self._counts_since_first
        return {
            "seconds": self.seconds,
            "graphs": found.graphs,
            "graph_breaks": found.breaks,
            "recompiles": CompileCounts.now().graphs - self._before_measuring.graphs,
        }

    def notes(self) -> list[Note]:
        found = self.to_dict()
        sentences = []
        if found["graph_breaks"]:
            sentences.append(
                f"torch.compile made {found['graphs']} graphs of the model, which it could not trace as a whole: "
                "what lies between them runs eager (TORCH_LOGS=graph_breaks says where)."
            )
        if found["recompiles"]:
            sentences.append(
                f"{found['recompiles']} graphs were compiled while steps were measured, and their compilation is in "
                "these figures: raise --warmup (TORCH_LOGS=recompiles says why)."
            )
        return [{"topic": TOPIC, "sentence": sentence, **found} for sentence in sentences]

    @property
    def _counts_since_first(self) -> CompileCounts:
        now = CompileCounts.now()
        return CompileCounts(now.graphs - self._first.graphs, now.breaks - self._first.breaks)

    def _compiles_in(self, step: Callable[[], None]) -> bool:
        """Take a step. Return whether it compiled something."""
        before, start = CompileCounts.now(), time.perf_counter()
        step()
        self.steps += 1
        if compiled := CompileCounts.now() != before:
            self.seconds += time.perf_counter() - start
        return compiled
