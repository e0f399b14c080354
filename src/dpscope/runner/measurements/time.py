"""Measurement of step time, and of the memory it peaked at.

Over several processes: the time of the slowest rank, and the peak of the rank that needs most. A simulated world is
this one process, without the others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

import torch

from dpscope.instruments.timing import Progress, Timing, no_progress, time_steps
from dpscope.instruments.trace.attribution import CollectiveBytes, busy_seconds, collective_time
from dpscope.instruments.trace.capture import record
from dpscope.instruments.trace.events import read_trace
from dpscope.results.payloads.memory import Collective, MemoryPayload, RanksPayload, TimingPayload
from dpscope.results.schema import Note, Result, result_for
from dpscope.runner.ranks import run_ranks
from dpscope.runner.spec import RunSpec
from dpscope.runner.steps import TrainingSteps
from dpscope.units import format_ms, format_ratio, mib, spread_of
from dpscope.vocabulary.instruments import Schedule
from dpscope.vocabulary.methods import STANDARD
from dpscope.vocabulary.settings import EAGER

BUSY = 2 / 3  # of a step; below, there is a note that the GPU waits
TURNS = 8  # pairs of blocks; each method comes first in half of them
BLOCK_MS = 250  # of a block, and at least `LEAST_STEPS`
LEAST_STEPS = 3


class RankFigures(TypedDict):
    timing: TimingPayload
    memory: MemoryPayload
    collectives: dict[str, Collective]  # of a step
    collective_share: float | None  # of a profiled step; None where there are no other processes
    notes: list[Note]


def measure_time(spec: RunSpec, progress: Progress, files: Path) -> Result:
    ranks: list[RankFigures]
    ranks = run_ranks(spec, progress, files) if spec.gpus > 1 else [measure_rank(spec, files, progress)]
    # A step is over when the slowest rank is.
    slowest = Timing([max(times) for times in zip(*(rank["timing"]["step_ms"] for rank in ranks), strict=True)])
    timing: TimingPayload = {**ranks[0]["timing"], **slowest.to_dict()}
    memory = max((rank["memory"] for rank in ranks), key=lambda each: each["peak_bytes"])
    return result_for(
        spec.to_dict(),
        avg_time_ms=timing["mean_ms"],
        peak_memory_mb=mib(memory["peak_bytes"]),
        timing=timing,
        memory=memory,
        notes=[*notes_on_simulation(spec), *ranks[0]["notes"]],
        **({"ranks": _ranks(spec, ranks)} if spec.world_size > 1 else {}),
    )


def _ranks(spec: RunSpec, ranks: Sequence[RankFigures]) -> RanksPayload:
    payload: RanksPayload = {
        "simulated": spec.simulate_world > 1,
        "time_ms": [rank["timing"]["median_ms"] for rank in ranks],
        "peak_bytes": [rank["memory"]["peak_bytes"] for rank in ranks],
        "collectives": ranks[0]["collectives"],
    }
    if spec.simulate_world > 1:
        sent = sum(each["sent_bytes"] for each in payload["collectives"].values())
        payload["link"] = {"gbps": spec.link_gbps, "send_ms": 1e3 * 8 * sent / (spec.link_gbps * 1e9)}
    else:
        payload["collective_share"] = [rank["collective_share"] or 0.0 for rank in ranks]
    return payload


def notes_on_simulation(spec: RunSpec) -> list[Note]:
    """Return a note that the figures are those of one rank alone, if the world is simulated."""
    sentence = (
        f"Simulated: one rank of {spec.simulate_world} ({spec.parallel}) without the others. Collectives return at "
        "once, so neither their time nor waiting is in the figures."
    )
    return [] if spec.simulate_world == 1 else [{"topic": "simulation", "sentence": sentence}]


def notes_on_host(busy_ms: float, step_ms: float, method: str) -> list[Note]:
    """Return a note if the GPU is idle for more than a third of a step, which then waits for the host."""
    if not 0 < busy_ms < BUSY * step_ms:
        return []
    sentence = f"The GPU is busy {format_ms(busy_ms)} of a step of {format_ms(step_ms)}: {method} is host-bound here."
    if method in ("standard", "flash"):
        sentence += " --cuda-graph off,on shows what it takes as a CUDA graph."
    return [{"topic": "host", "sentence": sentence, "busy_ms": busy_ms}]


def notes_on_turns(timing: TimingPayload, method: str) -> list[Note]:
    """Return a note on how the row's ratio was measured, if blocks of steps were timed in turns with standard."""
    if "in_turns" not in timing:
        return []
    ratios, steps = timing["in_turns"]["ratios"], timing["in_turns"]["steps"]
    low, high = map(format_ratio, spread_of(ratios))
    sentence = (
        f"× of {method} is the median of {len(ratios)} pairs of blocks of {steps} steps, in turns with standard in one "
        f"process ({low} to {high}): alone, each row's time depends on how fast the host is at that moment."
    )
    return [{"topic": "in turns", "sentence": sentence}]


def measure_rank(spec: RunSpec, files: Path, progress: Progress = no_progress) -> RankFigures:
    """Measure the spec's steps in this process."""
    step = TrainingSteps(spec)
    if spec.device == "cuda" and spec.world_size > 1:  # a model is whole where it is born, before it is sharded
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step.warm_up(progress)
    seen = CollectiveBytes()
    if spec.world_size > 1:
        with seen:
            step()
    timing = time_steps(step, device=spec.device, warmup=0, steps=spec.steps, progress=progress).to_dict()
    notes = step.notes()
    if step.compilation is not None:
        timing["compilation"] = step.compilation.to_dict()
    memory = step.peak()
    share = _share_of_collectives(step, spec.device) if spec.gpus > 1 else None
    if spec.device == "cuda" and spec.world_size == 1 and not spec.cuda_graph:
        notes += (waiting := notes_on_host(busy_seconds(step) * 1e3, timing["median_ms"], spec.method))
        if waiting and spec.method != STANDARD and spec.compile == EAGER:
            timing |= (found := time_in_turns(spec, step, timing["median_ms"], progress))
            notes += notes_on_turns(found, spec.method)
    step.require_finite_losses()
    if spec.world_size == 1:
        step.require_finite()
    return {
        "timing": timing,
        "memory": memory,
        "collectives": seen.collectives,
        "collective_share": share,
        "notes": notes,
    }


def time_in_turns(
    spec: RunSpec, step: TrainingSteps, step_ms: float, progress: Progress = no_progress
) -> TimingPayload:
    """Time blocks of steps in turns with ordinary training, in this process.

    A host-bound step is as fast as the host is at that moment, and hosts slow down and recover. In turns both methods
    meet the same host. Nothing is returned if there is no memory for a second model.
    """
    try:
        standard = TrainingSteps(replace(spec, method=STANDARD))
        standard.warm_up()
    except torch.OutOfMemoryError:
        return {}
    steps = max(LEAST_STEPS, round(BLOCK_MS / max(step_ms, 1e-3)))
    ratios = []
    for turn in range(TURNS):
        progress("in turns with standard", turn + 1, TURNS)
        order = (standard, step) if turn % 2 else (step, standard)
        blocks = {each: time_steps(each, device=spec.device, warmup=1, steps=steps).median_ms for each in order}
        ratios.append(blocks[step] / blocks[standard])
    return {"in_turns": {"ratios": ratios, "steps": steps}}


def _share_of_collectives(step: TrainingSteps, device: str) -> float:
    """Return how much of a step, recorded with torch.profiler, has a collective under way."""
    with tempfile.TemporaryDirectory() as folder:
        recording = record(step, Path(folder), device=device, schedule=Schedule(active=1))
        found = collective_time([read_trace(path) for path in recording.paths])
    return found["under_way_ms"] / found["step_ms"]
