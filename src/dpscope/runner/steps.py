"""The steps of a measurement: a trainer and its batches, compiled first if asked for, and losses checked afterwards.

Steps of compilation are taken before warm-up, timed apart, and counted if they happen in measured steps.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpscope.batches import tensors_of
from dpscope.errors import MeasurementFailed, UserError
from dpscope.flash.torch_side.shards import local
from dpscope.instruments.peaks import cpu_peak, cuda_peak
from dpscope.instruments.timing import Progress, no_progress
from dpscope.results.payloads.memory import CompilationPayload, MemoryPayload
from dpscope.results.schema import Note
from dpscope.runner import worker
from dpscope.runner.spec import RunSpec
from dpscope.trainers.base import TrainerBase, load_trainer, require_batch_of
from dpscope.trainers.modes import EAGER_STEPS, CompileCounts, forget_peak, must_compile
from dpscope.vocabulary.methods import resolve_method
from dpscope.vocabulary.settings import EAGER
from dpscope.workloads.workload import Batch, Workload, build_model, build_workload


def join_world(spec: RunSpec) -> int:
    """Join the spec's processes and return this one's rank. Real processes are started by torch.distributed.run."""
    worker.resume_collector()  # before there is any tensor: instruments ask it for those
    if spec.world_size == 1:
        return 0
    if dist.is_initialized():
        return dist.get_rank()
    if spec.simulate_world > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=spec.simulate_world)
        return 0
    if spec.device == "cuda":
        if (found := torch.cuda.device_count()) < spec.gpus:
            raise UserError(
                f"--gpus {spec.gpus}, but this machine has {found}: give fewer, or --simulate-world {spec.gpus} for "
                "the time and peak of one rank without the others"
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if spec.device == "cuda" else "gloo")
    return dist.get_rank()


def assemble(spec: RunSpec) -> tuple[TrainerBase, list[Batch]]:
    """Return the trainer of a spec and the batches of a step, all on the spec's device."""
    trainer_class = load_trainer(resolve_method(spec.method))
    rank = join_world(spec)
    workload, model = build(spec, spec.batch_size)
    trainer = trainer_class(model, workload.loss, spec.settings)
    # Last, so that what the model alone takes can be seen.
    seeds = range(spec.seed + rank * spec.accumulate, spec.seed + (rank + 1) * spec.accumulate)
    batches = [workload.batch(seed, torch.device(spec.device)) for seed in seeds]
    for batch in batches:
        require_batch_of(batch, spec.batch_size)
    return trainer, batches


def build(spec: RunSpec, batch_size: int) -> tuple[Workload, nn.Module]:
    """Return the workload of a spec with batches of a size, and its model, on the spec's device."""
    workload = build_workload(spec.workload, batch_size=batch_size, seq_len=spec.seq_len)
    torch.manual_seed(spec.seed)
    with torch.device(spec.device):  # parameters are born where they are used: no copy of a large model on the host
        return workload, build_model(workload, spec.param_dtype)


def make_trainer(spec: RunSpec) -> tuple[TrainerBase, Batch]:
    """Return the trainer and its batch, for steps of one batch."""
    trainer, (batch,) = assemble(spec)
    return trainer, batch


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
    def of(
        cls, step: Callable[[], None], device: str | None, progress: Progress, on_any_rank: Callable[[bool], bool]
    ) -> Compilation:
        """Take steps until two in a row compile nothing on any rank.

        `step` waits for the device, whose peak is forgotten. Ranks agree, because all of them have to take each step.
        """
        compilation, settled = cls(), 0
        with must_compile():
            while settled < SETTLED and compilation.steps < MOST_STEPS:
                progress("compiling", compilation.steps, compilation.steps + SETTLED - settled)
                settled = 0 if on_any_rank(compilation._compiles_in(step)) else settled + 1
                if not settled and device is not None:
                    forget_peak(torch.device(device))  # autotuning tries kernels on tensors of its own
        compilation.begin_measuring()
        return compilation

    def begin_measuring(self) -> None:
        """Count what is compiled from here on as compiled during measured steps."""
        self._before_measuring = CompileCounts.now()

    def to_dict(self) -> CompilationPayload:
        now = CompileCounts.now()
        return {
            "seconds": self.seconds,
            "graphs": now.graphs - self._first.graphs,
            "graph_breaks": now.breaks - self._first.breaks,
            "recompiles": now.graphs - self._before_measuring.graphs,
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

    def _compiles_in(self, step: Callable[[], None]) -> bool:
        """Take a step. Return whether it compiled something."""
        before, start = CompileCounts.now(), time.perf_counter()
        step()
        self.steps += 1
        if compiled := CompileCounts.now() != before:
            self.seconds += time.perf_counter() - start
        return compiled


STEPS_TO_CAPTURE = EAGER_STEPS + 1

BEFORE_ANY_UPDATE = (
    "before any update: look for a division by zero, a logarithm of zero or an overflow in the model, the data and the "
    "loss function"
)


class TrainingSteps:
    """Training step to call. Reading a loss waits for the GPU, so losses are kept until `require_finite_losses`."""

    def __init__(self, spec: RunSpec, *, warmup: int | None = None) -> None:
        self.trainer, self.batches = assemble(spec)
        self._spec = spec
        self._warmup = spec.warmup if warmup is None else warmup
        self.compilation: Compilation | None = None
        self._done = 0  # steps whose loss was looked at
        self._losses: list[object] = []  # of the steps since

    def __call__(self) -> None:
        self._losses.append(self.trainer.train_step(*self.batches))

    def warm_up(self, progress: Progress = no_progress) -> None:
        """Take the steps before the measured ones; raise at the first loss that is not finite."""
        self.compile(progress)
        self.capture(progress)
        self._take_checked(self._warmup, "warm-up", progress)
        if self.compilation is not None:
            self.compilation.begin_measuring()
        self.trainer.begin_measuring()

    def compile(self, progress: Progress = no_progress) -> None:
        """Take steps until torch.compile has nothing left to do, if the spec compiles."""
        if self._spec.compile == EAGER:
            return

        def step() -> None:
            self()
            self.require_finite_losses()  # which waits for the device

        # The peak of a CUDA graph is that of its capture, which is among these steps.
        device = None if self._spec.cuda_graph else self._spec.device
        self.compilation = Compilation.of(step, device, progress, self._on_any_rank)

    def _on_any_rank(self, happened: bool) -> bool:
        """Return whether something happened on any rank of the spec's processes."""
        if self._spec.gpus == 1:
            return happened
        flag = torch.tensor(int(happened), device=self._spec.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def capture(self, progress: Progress = no_progress) -> None:
        """Take steps until they replay a CUDA graph, if the spec asks for one."""
        self._take_checked(STEPS_TO_CAPTURE if self._spec.cuda_graph else 0, "capturing", progress)

    def _take_checked(self, steps: int, stage: str, progress: Progress) -> None:
        for done in range(steps):
            self()
            self.require_finite_losses()
            progress(stage, done + 1, steps)

    @property
    def is_opaque(self) -> bool:
        """True if nothing can be seen of what a step does: it is compiled, or a CUDA graph."""
        return self.compilation is not None or self._spec.cuda_graph

    def notes(self) -> list[Note]:
        """Return what a reader of the row's figures should know. Call it after all steps."""
        return [*self.trainer.notes(), *(self.compilation.notes() if self.compilation else ())]

    def peak(self) -> MemoryPayload:
        """Return the peak of the steps so far (CUDA), or of one more step (CPU). Call it after all timed steps."""
        if self._spec.device == "cuda":
            return cuda_peak()
        self.require_finite_losses()  # what is kept of the losses is none of the step's
        self.trainer.optimizer.zero_grad(set_to_none=True)
        held = (self.trainer.model.state_dict(keep_vars=True), self.trainer.optimizer.state_dict(), self.batches)
        return cpu_peak(self, map(local, tensors_of(held)))

    def require_finite_losses(self) -> None:
        """Raise `MeasurementFailed`, which names the first step whose loss is inf or NaN. Waits for the device."""
        losses, self._losses = self._losses, []
        if self._spec.simulate_world > 1:
            return  # the weights of other ranks are made up, and losses mean nothing
        for loss in losses:
            if isinstance(loss, Tensor | float | int) and not math.isfinite(value := float(loss)):
                if self._done == 0:
                    raise MeasurementFailed(
                        f"the loss is {value} from the first step on ({self._name(0)}), {BEFORE_ANY_UPDATE}"
                    )
                raise MeasurementFailed(
                    f"the loss is {value} from {self._name(self._done)} on, and was finite before: training diverges, "
                    f"or a gradient is not finite. {self._advice()}"
                )
            self._done += 1

    def require_finite(self) -> None:
        """Check the losses, and the parameters after the last update. Call it after all measurements."""
        self.require_finite_losses()
        for name, parameter in self.trainer.model.named_parameters():
            values = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
            if not (values.numel() and parameter.requires_grad and values.is_floating_point()):
                continue
            # Only extremes are computed, which needs no extra memory.
            if not all(math.isfinite(float(extreme)) for extreme in torch.aminmax(values)):
                raise MeasurementFailed(
                    f"the loss was finite, but after {self._name(self._done - 1)} parameter {name} holds inf or NaN: "
                    f"its gradient is not finite, or training diverges. {self._advice()}"
                )

    def _name(self, step: int) -> str:
        compiling = self.compilation.steps if self.compilation else 0
        if step < compiling or (self.compilation is None and self._spec.compile != EAGER):
            return f"step {step + 1} of compilation"
        step -= compiling + (STEPS_TO_CAPTURE if self._spec.cuda_graph else 0)
        if step < 0:
            return f"step {step + STEPS_TO_CAPTURE + 1} before the CUDA graph"
        if step < self._warmup:
            return f"warm-up step {step + 1}"
        return f"step {step - self._warmup + 1}" + (" after the warm-up" if self._warmup else "")

    def _advice(self) -> str:
        return f"Try --learning-rate {self._spec.learning_rate / 100:g}, and look at the loss function"
