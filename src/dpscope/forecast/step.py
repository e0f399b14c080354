"""A step on the fake device: its peak by component, and what it works on. Nothing is trained, nothing is measured."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dpscope.batches import tensors_of
from dpscope.errors import UserError
from dpscope.flash.torch_side.shards import is_shard_type, local
from dpscope.forecast.allocator import OutOfFakeMemory
from dpscope.forecast.cards import Card
from dpscope.forecast.fake_device import DEVICE, FakeDevice, open_device
from dpscope.forecast.fake_world import fake_world
from dpscope.forecast.work import Work, slower_of
from dpscope.instruments.memory import Tracker, attribute
from dpscope.instruments.memory.record import Life
from dpscope.instruments.trace.attribution import CollectiveBytes
from dpscope.runner.spec import RunSpec
from dpscope.trainers.base import TrainerBase, load_trainer, require_batch_of
from dpscope.vocabulary.components import GRADIENTS, INPUTS, UNATTRIBUTED
from dpscope.vocabulary.methods import resolve_method
from dpscope.vocabulary.settings import EAGER
from dpscope.workloads.workload import Batch, Workload, build_model, build_workload

VERIFIED = (True, False, True)  # of steps before the last: flash clipping verifies the model in it
ACCUMULATES_FROM = 2  # the number of the first step that has all of its passes
MOST_PASSES = 2  # of a step that are run: those that follow take as much as the second
ROUNDED_BLOCK = 0.005  # by which peaks of equal steps may differ, because blocks are larger than what they hold
_OF_FAKES = ("FakeTensor", "DataDependent", "DynamicOutput", "AssertionError")  # in what torch says of fake tensors
SAMPLES = 4  # of a batch that are really made, for their ids and masks; others repeat them


@dataclass(frozen=True)
class StepForecast:
    """Predicted peak and time of one step."""

    peak_bytes: int  # that torch's allocator hands out at most, while flash clipping verifies the model included
    reserved_bytes: int  # that it takes from the device for that
    step_bytes: int = 0  # peak of a step in which nothing is verified
    components: dict[str, int] = field(default_factory=dict)  # of the peak; they add up to it
    seconds: float = 0.0
    gpu_seconds: float = 0.0
    host_seconds: float = 0.0
    sending_seconds: float = 0.0  # between processes; what is not hidden behind computing comes on top
    families: dict[str, list[float]] = field(default_factory=dict)  # [flops, bytes, kernels, seconds]
    operators: int = 0
    kernels: int = 0
    is_estimate: bool = False  # rows go to experts by values, which are not known

    @property
    def peaks_verifying(self) -> bool:
        """True if the peak is that of flash clipping's verification, and not of a step."""
        return self.peak_bytes > self.step_bytes * (1 + ROUNDED_BLOCK)


def forecast_step(
    spec: RunSpec, card: Card, *, detailed: bool = True, attributed: bool = True, limit: int | None = None
) -> StepForecast:
    """Run a few steps of a spec on the fake device.

    `detailed`: also say how long the step takes, and which component each byte of the peak is, if `attributed`.
    `limit`: bytes that torch's allocator may reserve; `OutOfFakeMemory` is raised for a step that needs more.
    """
    if spec.simulate_world > 1:
        spec = replace(spec, gpus=spec.simulate_world, simulate_world=1)
    samples = min(SAMPLES, spec.batch_size)
    small = build_workload(spec.workload, batch_size=samples, seq_len=spec.seq_len)
    batch = _of_samples(small.batch(spec.seed, torch.device("cpu")), samples)
    alone = spec.world_size == 1
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        with (
            _quiet(),
            _uncollected(),
            open_device(card, limit if alone else None) as device,
            fake_world(spec.settings, device.allocator),
        ):
            trainer = _trainer(spec, small)
            if not alone:  # a model that is sharded is whole where it is born, unless that is nowhere (meta)
                device.allocator.begin_again(limit)
            sizes = {samples: spec.batch_size}
            fake = tree_map_only(Tensor, lambda leaf: device.put(leaf, sizes), batch)
            batches = [fake] * min(spec.accumulate, MOST_PASSES)
            return _step(spec, card, device, trainer, batches, detailed, attributed)
    except (UserError, OutOfFakeMemory):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        is_of_fakes = any(word in said for word in _OF_FAKES)
        advice = "make every tensor inside of the workload's functions, or measure it" if is_of_fakes else "try it"
        raise UserError(
            f"a step of {spec.method} cannot be followed on fake tensors ({said}): {advice} on real ones (dpscope "
            "compare)"
        ) from error
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def _of_samples(batch: Batch, samples: int) -> Batch:
    """Return so many samples of a batch, repeated if a workload makes batches of one size alone."""
    sizes = {len(leaf) for leaf in tensors_of(batch) if leaf.dim()}
    if len(sizes) == 1 and samples not in sizes and min(sizes):
        batch = tree_map_only(
            Tensor, lambda leaf: leaf[torch.arange(samples) % len(leaf)] if leaf.dim() else leaf, batch
        )
    require_batch_of(batch, samples)
    return batch


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause Python's collector of reference cycles: it takes a seventh of a prediction."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide warnings, and torch's log of operators that do not take fake tensors: such an error is caught or told."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with warnings.catch_warnings(), patch.object(log, "disabled", True):
        warnings.simplefilter("ignore")
        yield


def _step(
    spec: RunSpec,
    card: Card,
    device: FakeDevice,
    trainer: TrainerBase,
    batches: list[Batch],
    detailed: bool,
    attributed: bool,
) -> StepForecast:
    # As in training, the first step is verified, and a later one, when the optimizer has its state. What is reserved
    # grows until the third: blocks that were split in one step do not always serve the next.
    one_pass: _Watched | None = None
    for number, verifies in enumerate(VERIFIED):
        device.run.verifies = verifies
        passes = batches if number >= ACCUMULATES_FROM else batches[:1]
        is_compared = detailed and not verifies and len(passes) < len(batches)
        with _watching(spec, card) if is_compared else nullcontext() as watched:
            trainer.train_step(*passes)
        one_pass = watched or one_pass
    device.run.verifies = False
    segments = device.allocator.segments
    segments.step_peak = 0
    with _watching(spec, card) if detailed else nullcontext() as watched:
        trainer.train_step(*batches)
    steady, peak, reserved = segments.step_peak, segments.peak_allocated, segments.peak_reserved
    if watched is None:
        return StepForecast(peak, reserved, steady, is_estimate=device.routes_rows)
    device.run.verifies = StepForecast(peak, reserved, steady).peaks_verifying
    components = _components(trainer, batches, device) if attributed else {}
    figures = watched.figures()
    if one_pass is not None:  # each further pass takes what the second took more than the first
        further = spec.accumulate - len(batches)
        figures = {name: two + further * (two - one_pass.figures().get(name, 0)) for name, two in figures.items()}
    gpu, host, sending = (figures[name] for name in ("gpu", "host", "sending"))
    families: dict[str, list[float]] = {family: [0.0] * 4 for family in watched.work.by_family}
    for name, value in figures.items():
        if isinstance(name, tuple):
            families[name[0]][name[1]] = value
    return StepForecast(
        peak,
        reserved,
        steady,
        {**components, UNATTRIBUTED: peak - sum(components.values())},
        max(slower_of(gpu, host), sending),
        gpu,
        host,
        sending,
        families,
        round(figures["operators"]),
        round(figures["kernels"]),
        device.routes_rows,
    )


@dataclass(frozen=True)
class _Watched:
    """Work of a step, and what it sent to other processes."""

    work: Work
    sent: CollectiveBytes
    link_gbps: float

    def figures(self) -> dict[Any, float]:
        """Return all figures that grow with the passes of a step; those of a family by its name and place."""
        work = self.work
        families = work.by_family.items()
        return {
            "gpu": work.gpu_seconds,
            "host": work.host_seconds,
            "sending": 8e-9 * sum(each["sent_bytes"] for each in self.sent.collectives.values()) / self.link_gbps,
            "operators": work.operators,
            "kernels": work.kernels,
            **{(family, place): value for family, total in families for place, value in enumerate(total)},
        }


@contextmanager
def _watching(spec: RunSpec, card: Card) -> Iterator[_Watched]:
    watched = _Watched(Work(card, spec.method, tf32=spec.dtype == "tf32"), CollectiveBytes(), spec.link_gbps)
    with watched.work.watching(), watched.sent if spec.world_size > 1 else nullcontext():
        yield watched


def _trainer(spec: RunSpec, workload: Workload) -> TrainerBase:
    with torch.device(DEVICE):
        # torch.Tensor(…) and torch.FloatTensor(…), of which some models make parameters, are born on the CPU.
        model = build_model(workload, spec.param_dtype).to(DEVICE)
    make: Any = load_trainer(resolve_method(spec.method))
    eager = spec.settings if spec.compile == EAGER else type(spec.settings)(**{**vars(spec.settings), "compile": EAGER})
    with patch.object(TrainerBase, "noise_generator", lambda trainer: None):  # there is no device to draw on
        trainer: TrainerBase = make(model, workload.loss, eager)
    return trainer


class _FakeTracker(Tracker):  # type: ignore[no-untyped-call]
    """Tracker of the fake device's storages, which lie on `meta`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (
            NotImplemented if any(map(is_shard_type, types)) else super().__torch_dispatch__(func, types, args, kwargs)
        )

    def _lives_of(self, tensor: Tensor, operator: str) -> list[Life]:
        return super()._lives_of(tensor, operator) if tensor.device.type == "cuda" else []


def _components(trainer: TrainerBase, batches: list[Batch], device: FakeDevice) -> dict[str, int]:
    def holdings() -> list[Any]:
        buckets = getattr(getattr(trainer.model, "reducer", None), "buckets", ())  # of DDP
        held = [*((INPUTS, "", tensor) for tensor in tensors_of(batches)), *trainer.holdings()]
        held += [(GRADIENTS, "", bucket) for bucket in buckets]
        return [(component, module, local(tensor)) for component, module, tensor in held]

    tracker = _FakeTracker("meta", trainer.plain_model, holdings)
    with tracker.tracking():
        trainer.train_step(*batches)
    return dict(attribute(tracker.record, trainer.memory_rules).peak_components)
