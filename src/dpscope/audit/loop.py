"""A private training loop as an audit drives it: one step on a given batch, read off the parameters."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpscope.errors import UserError
from dpscope.places import number_in
from dpscope.random_states import RandomStates, seed_all
from dpscope.workloads.workload import Batch, silence

LARGE_MODEL = 2**26  # bytes
Tensors = dict[str, Tensor]  # by the name of a parameter or buffer


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Training loop to check: a model, and a function that takes one private step on a batch with plain SGD.

        p ← p − scale · (Σ_b c_b v_b + σC·z)        scale = learning rate / expected batch size

    Args:
        model: The model. Its parameters are read, and restored after each step.
        step: Takes a batch and does one private step.
        scale: The learning rate over the expected batch size.
        accountant: Opacus's, or anything whose `history` is [(noise multiplier, sample rate, steps), …]. If it has
            `get_epsilon(delta)`, that is tested too.
        sample_rate: The rate that the accountant should be told.
        loader: The data that it trains on. If it is a DataLoader, the sampling of batches is tested.
        save: Returns what a checkpoint holds.
        resume: Takes what `save` returned, in a new loop.

    Example:
        >>> def step(batch):
        ...     optimizer.zero_grad()
        ...     loss_fn(model(batch[0]), batch[1]).backward()
        ...     optimizer.step()
        >>> loop = dpscope.Loop(model=model, step=step, scale=0.1 / 8)  # learning rate over batch size
    """

    model: nn.Module
    step: Callable[[Batch], object]
    scale: float
    accountant: Any = None
    sample_rate: float | None = None
    loader: Any = None
    save: Callable[[], Any] | None = None
    resume: Callable[[Any], object] | None = None


class MakeLoop(Protocol):
    def __call__(self, *, noise_multiplier: float, max_grad_norm: float, seed: int) -> Loop: ...


class StepFailed(Exception):
    """The loop raised an error; the message says which, in a sentence."""


@dataclass(frozen=True)
class ObservedStep:
    """One step: what it added up, and buffers that it changed, wherever the parameters are."""

    sums: Tensors
    buffers: Tensors

    def distance(self, other: ObservedStep) -> float:
        """Return ‖Σ − Σ'‖ over all parameters; infinite if either is not finite."""
        return _norm(self.sums[name].double() - other.sums[name].double() for name in self.sums)

    @property
    def norm(self) -> float:
        return _norm(total.double() for total in self.sums.values())


def _norm(tensors: Iterable[Tensor]) -> float:
    norms = [tensor.norm() for tensor in tensors]
    norm = float(torch.stack([n.to(norms[0].device) for n in norms]).norm()) if norms else 0.0
    return norm if math.isfinite(norm) else math.inf


class LoopFactory:
    """Factory of loops that all start from the parameters of the first one."""

    def __init__(self, make_loop: MakeLoop, seed: int) -> None:
        self.make_loop = make_loop
        self.seed = seed
        self.made = 0
        self.start: Tensors = {}
        self.start_buffers: Tensors = {}
        self.trainable: list[str] = []
        self.random = False  # whether a step without noise depends on what it draws (dropout)

    def loop(self, *, max_grad_norm: float, noise_multiplier: float = 0.0, silent: bool = False) -> RunningLoop:
        """Return a running loop; `silent`: with dropout and the like switched off."""
        return RunningLoop(self, max_grad_norm, noise_multiplier, silent=silent)

    def make(self, max_grad_norm: float, noise_multiplier: float, *, silent: bool) -> Loop:
        """Return a new loop with a seed of its own; `silent`: with dropout and the like switched off."""
        if sum(p.nbytes for p in self.start.values()) > LARGE_MODEL:
            release_memory()  # of loops before
        self.made += 1
        seed = (self.seed + self.made) % 2**63
        seed_all(seed)
        with _loop_errors():
            loop = self.make_loop(noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm, seed=seed)
        if not isinstance(loop, Loop):
            raise UserError(f"make_loop has to return a dpscope.Loop, not {type(loop).__name__}")
        if not (math.isfinite(loop.scale) and loop.scale > 0):
            raise UserError(
                f"Loop(scale=…) is the learning rate / the expected batch size, above 0, not {loop.scale!r}"
            )
        if not self.start:
            self.start = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
            self.start_buffers = {name: b.detach().clone() for name, b in loop.model.named_buffers()}
            self.trainable = [name for name, p in loop.model.named_parameters() if p.requires_grad]
        if silent:
            silence(loop.model)
        return loop

    def rounding(self, scale: float) -> float:
        """Return what an update loses by being added to the parameters: a norm, in the unit of the sums."""
        floating = [p for p in self.start.values() if p.is_floating_point()]
        return math.hypot(*(float(p.double().norm()) * torch.finfo(p.dtype).eps for p in floating)) / scale


class RunningLoop:
    """Loop whose parameters and buffers, and nothing else, are reset before every step.

    Steps without noise all draw the same random numbers: the same batch gives the same sum. A step that raises an error
    may leave anything behind, so a new loop then takes its place.
    """

    def __init__(
        self, factory: LoopFactory, max_grad_norm: float, noise_multiplier: float, *, silent: bool = False
    ) -> None:
        self.factory, self.noise_multiplier = factory, noise_multiplier
        self._make = partial(factory.make, max_grad_norm, noise_multiplier, silent=silent)
        self.loop = self._make()

    def step(self, batch: Batch, factor: float = 1.0, *, state: RandomStates | int = 0) -> ObservedStep:
        """Take one step from the parameters of the start, times `factor`.

        state   without noise, where random generators stand before it, or another seed than the usual one
        """
        if isinstance(state, RandomStates):
            state.put_back()
        elif not self.noise_multiplier:
            seed_all((self.factory.seed + state) % 2**63)
        start = self.factory.start
        if factor != 1:
            start = {name: p * factor if p.is_floating_point() else p for name, p in start.items()}
        self._restore(start)
        try:
            with _loop_errors():
                self.loop.step(batch)
            sums = {}
            for name, p in self.loop.model.named_parameters():
                if p.is_floating_point():
                    total = (start[name].double() - p.detach().double()) / self.loop.scale
                    sums[name] = total.to(torch.promote_types(p.dtype, torch.float32))
            before = self.factory.start_buffers
            changed = {
                name: b.detach().double()
                for name, b in self.loop.model.named_buffers()
                if name not in before or not torch.equal(b, before[name])
            }
            return ObservedStep(sums, changed)
        except StepFailed:
            self.loop = self._make()
            raise

    @torch.no_grad()
    def _restore(self, start: Tensors) -> None:
        for name, p in self.loop.model.named_parameters():
            if name not in self.factory.start or self.factory.start[name].shape != p.shape:
                raise UserError(f"make_loop has to return the same model every time, but {name} is not in the first")
            p.copy_(start[name])
        for name, b in self.loop.model.named_buffers():
            if name in self.factory.start_buffers and self.factory.start_buffers[name].shape == b.shape:
                b.copy_(self.factory.start_buffers[name])


@contextmanager
def _loop_errors() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise StepFailed("out of GPU memory") from None
    except Exception as error:
        said = " ".join(str(error).split()) or "no message"
        name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise StepFailed(f"{name}{said[:300]}") from error


def release_memory() -> None:
    """Free reference cycles (engines and their models form some), and return freed memory to the system."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's: it keeps what was freed otherwise
        if trim is not None:
            trim(0)


def free_memory() -> int | None:
    """Return the bytes that this process can still take, by the system and its control group; None if unknown."""
    kib = number_in("/proc/meminfo", r"^MemAvailable:\s+(\d+)")
    found = [None if kib is None else 1024 * kib]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, now = (number_in(file, r"\A(\d+)\s*\Z") for file in (limit, used))
        found.append(None if most is None or now is None else max(0, most - now))
    return min((each for each in found if each is not None), default=None)
