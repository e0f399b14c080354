"""Measurement of memory: one step under the tracker, after steps that nothing watches.

On CUDA the peaks shown are the allocator's own, of untracked steps; the tracker says what they are made of. The CPU
allocator keeps no statistics, so the tracked peak is shown, and a step under the profiler checks it. Compiled code
allocates without the dispatcher, and a CUDA graph not at all: the memory of such a step is `unattributed`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dpscope.batches import tensors_of
from dpscope.errors import UserError
from dpscope.instruments import peaks
from dpscope.instruments.memory import Holding, MemoryUse, Tracker, attribute
from dpscope.instruments.peaks import Snapshots
from dpscope.instruments.timing import Progress
from dpscope.places import Place, parse_place
from dpscope.results.derived import NotConserved, conservation_faults
from dpscope.results.payloads.memory import MemoryPayload, Remainder
from dpscope.results.schema import Result, result_for
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import TrainingSteps
from dpscope.trainers.base import TrainerBase
from dpscope.units import mib
from dpscope.vocabulary.components import COMPILED, INPUTS, KEYS, TRACKER, UNATTRIBUTED
from dpscope.vocabulary.methods import resolve_method
from dpscope.vocabulary.phases import listening
from dpscope.workloads.workload import Batch


def resolve_rule(where: str) -> str:
    """Return the place with its file's absolute path, for a child process."""
    place = _place_of(where)
    if not place.is_file:
        return where
    file = Path(place.source)
    if not file.is_file():
        raise UserError(f"--rule {where!r}: there is no file {place.source}")
    return str(Place(str(file.resolve()), place.name))


def load_rule(where: str) -> Callable[[Any], str | None]:
    place = _place_of(where)
    try:
        rule: Callable[[Any], str | None] = place.load()
    except FileNotFoundError:
        raise UserError(f"--rule {where!r}: there is no file {place.source}") from None
    except ModuleNotFoundError as error:
        raise UserError(f"--rule {where!r}: there is no module {error.name!r}") from None
    except AttributeError:
        raise UserError(f"--rule {where!r}: {place.source} has no {place.name!r}") from None
    if not callable(rule):
        raise UserError(f"--rule {where!r}: {place.name} is not a function")
    return rule


def _place_of(where: str) -> Place:
    place = parse_place(where)
    if place is None:
        raise UserError(f"--rule {where!r}: expected FILE.py:function or package.module:function")
    return place


ITERATIONS = 3  # untracked steps with snapshots, at most: every step of a run is like the next
MEMORY_VIZ = "memory_viz.pickle"
IN_COMPILED = "what the compiled or captured step makes: activations, gradients, temporaries"


def measure_memory(spec: RunSpec, progress: Progress, files: Path) -> Result:
    rules = [load_rule(spec.option("rule"))] if spec.option("rule") else []
    snapshots = Snapshots(spec.device, private=resolve_method(spec.method).private)
    with listening(snapshots.at_stage):
        step = TrainingSteps(spec)
    step.warm_up(progress)
    snapshots.take(peaks.AFTER_WARMUP)
    watch = _on_cuda if spec.device == "cuda" else _on_cpu if step.compilation is None else _on_cpu_compiled
    tracker = Tracker(spec.device, step.trainer.plain_model, partial(_holdings, step.trainer, step.batches))
    allocator = watch(step, tracker, snapshots, min(spec.steps, ITERATIONS), progress)
    use = attribute(tracker.record, [*rules, *step.trainer.memory_rules])
    written = {}
    if spec.option("memory_viz"):
        peaks.write_memory_history(step, files / MEMORY_VIZ)
        written["allocations of a step, for pytorch.org/memory_viz"] = MEMORY_VIZ
    if spec.device == "cuda":
        allocator["cublas_workspace_bytes"] = peaks.cublas_workspace_bytes()
    step.require_finite()
    memory = _memory(use, allocator, compiled=step.is_opaque)
    parts = memory["peak"]["components"]
    named = {f"{key}_mb": mib(parts[key]) for key in (*KEYS, *(key for key in parts if key not in KEYS))}
    peak = mib(memory["peak_bytes"])
    result = result_for(
        spec.to_dict(),
        peak_memory_mb=peak,
        memory=memory,
        breakdown={**named, "total_allocated_mb": peak, "peak_allocated_mb": peak},
        snapshots=snapshots.taken,
        timeline=use.timeline(),
        files=written,
        notes=step.notes(),
    )
    if faults := conservation_faults(result):
        raise NotConserved("; ".join(faults))
    return result


def _holdings(trainer: TrainerBase, batches: list[Batch]) -> list[Holding]:
    return [*((INPUTS, "", tensor) for tensor in tensors_of(batches)), *trainer.holdings()]


def _on_cuda(
    step: TrainingSteps, tracker: Tracker, snapshots: Snapshots, iterations: int, progress: Progress
) -> MemoryPayload:
    """Take the allocator's peaks over untracked steps, with a snapshot at each stage; then track a step."""
    torch.cuda.synchronize()
    if not step.is_opaque:  # replays of CUDA graphs allocate nothing: their peak is that of the recording
        torch.cuda.reset_peak_memory_stats()
    for iteration in range(iterations):
        with listening(snapshots.in_iteration(iteration)):
            step()
        step.require_finite_losses()  # no loss of an earlier step lives in a later one
        snapshots.after_step(iteration)
        progress("untracked step", iteration + 1, iterations)
    torch.cuda.synchronize()
    allocator = peaks.cuda_peak()
    if step.is_opaque:
        _note_before_step(step, tracker)
        return allocator
    with tracker.tracking():
        step()
        step.require_finite_losses()
    torch.cuda.synchronize()
    progress("tracked step", 1, 1)
    return allocator


def _on_cpu(
    step: TrainingSteps, tracker: Tracker, snapshots: Snapshots, iterations: int, progress: Progress
) -> MemoryPayload:
    """Track a step, with a snapshot at each stage; then take one under the profiler to compare with."""
    with tracker.tracking(), listening(snapshots.in_iteration(0, lambda: tracker.live_bytes)):
        step()
        step.require_finite_losses()
        snapshots.after_step(0, tracker.live_bytes)
    progress("tracked step", 1, 1)
    step.trainer.optimizer.zero_grad(set_to_none=True)
    live = [tensor for _, _, tensor in _holdings(step.trainer, step.batches)]
    seen = peaks.cpu_peak(step, live)
    progress("checked step", 1, 1)
    return {"allocator_peak_bytes": seen["peak_bytes"], "peak_rss_bytes": seen["peak_rss_bytes"]}


def _on_cpu_compiled(
    step: TrainingSteps, tracker: Tracker, snapshots: Snapshots, iterations: int, progress: Progress
) -> MemoryPayload:
    """Take one step under the profiler, which sees what compiled code allocates."""
    seen = step.peak()
    _note_before_step(step, tracker)
    progress("profiled step", 1, 1)
    return {"allocator_peak_bytes": seen["peak_bytes"], "peak_rss_bytes": seen["peak_rss_bytes"]}


def _note_before_step(step: TrainingSteps, tracker: Tracker) -> None:
    """Record what is there before a step: parameters, optimizer states, inputs."""
    step.require_finite_losses()
    step.trainer.optimizer.zero_grad(set_to_none=True)
    with tracker.tracking():
        pass


def _memory(use: MemoryUse, allocator: MemoryPayload, *, compiled: bool) -> MemoryPayload:
    counted = allocator.get("allocator_peak_bytes", use.peak_bytes) if compiled else use.peak_bytes
    peak_bytes = allocator.get("peak_allocated_bytes", counted)
    unattributed = _unattributed(use, allocator, IN_COMPILED if compiled else "inside operators and libraries")
    assert peak_bytes - use.peak_bytes == sum(item["bytes"] for item in unattributed)
    components = use.peak_components | {UNATTRIBUTED: peak_bytes - use.peak_bytes}
    birth = use.peak_birth
    phase, operator, module = (birth.phase, birth.operator, birth.module) if birth else ("", "", "")
    return {
        **allocator,
        "source": COMPILED if compiled else TRACKER,
        "peak_bytes": peak_bytes,
        "tracked_peak_bytes": use.peak_bytes,
        "peak": {"phase": phase, "operator": operator, "module": module, "components": components},
        "modules": use.modules_at_peak(),
        "tensors": use.tensors_at_peak(),
        "unattributed": unattributed,
    }


def _unattributed(use: MemoryUse, allocator: MemoryPayload, rest: str) -> list[Remainder]:
    """Return the parts of the allocator's peak beyond the tracked one; `rest`: what most of it is."""
    if "peak_allocated_bytes" not in allocator:
        untracked = allocator["allocator_peak_bytes"] - use.peak_bytes
        return [{"what": rest, "bytes": untracked}] if rest == IN_COMPILED and untracked else []
    allocated, requested = allocator["peak_allocated_bytes"], allocator["peak_requested_bytes"]
    workspaces = allocator["cublas_workspace_bytes"]
    parts = {
        "cuBLAS workspaces": workspaces,
        "rounding of blocks to 512 bytes": allocated - requested,
        rest: requested - use.peak_bytes - workspaces,
    }
    return [{"what": what, "bytes": count} for what, count in parts.items() if count]
