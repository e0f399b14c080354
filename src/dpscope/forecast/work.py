"""Step time: its operators' bytes and operations against what a card sustains, and the host's pace.

A kernel's time is set by its operations or its bytes, whichever is slower, at the share of the card's peak that such
kernels reach, plus a launch cost. The host takes some microseconds for each operator, and more for a convolution. The
slower of the two decides. The shares and the host's pace were fitted to steps on H200s (benchmarks/results/…-plan.md).
Hosts differ: one of four runs, fitted alone, gives 12 µs an operator, three give 17 to 18. The constants follow these.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpscope.flash.torch_side.shards import is_shard_type
from dpscope.forecast.cards import FP32, HALF, TF32, Card
from dpscope.forecast.remembered_results import key_of
from dpscope.instruments.estimate import distinct_tensors, flops_of, moved_by, operator_name, tensor_bytes
from dpscope.instruments.families import operator_family
from dpscope.instruments.gradient_sums import as_without_modes
from dpscope.vocabulary import phases
from dpscope.vocabulary.phases import ATTENTION, GEMM

UNALIGNED = "gemm, unaligned"  # a vocabulary of 50,257 is the common case
CONVOLUTION = "convolution"
PRODUCTS = {HALF: 0.77, TF32: 0.79, FP32: 0.73}  # shares of the card's peak that matrix products reach
SLOWER = {UNALIGNED: 0.4, CONVOLUTION: 0.22}  # times that
ATTENDING = 0.7  # by attention's kernels; those of float32 without tensor cores
MOVING = 0.61  # of the bandwidth, by kernels that move bytes
BEGINNING = 5e-6  # seconds a kernel takes besides
HOST = 17.5e-6  # seconds the host takes for an operator
HOST_OF = {"flash": 1.9}  # times that: Python of the taps runs between the operators
HOST_CONVOLVING = 215e-6  # seconds the host takes for a convolution besides, measured but not traced
TOGETHER = 6  # how sharply the slower of GPU and host decides: the exponent of their norm


def slower_of(gpu_seconds: float, host_seconds: float) -> float:
    """Return the time of a step, which is somewhat longer than the slower part if both are about equal."""
    return float((gpu_seconds**TOGETHER + host_seconds**TOGETHER) ** (1 / TOGETHER))


def _format_of(tensors: Sequence[Tensor]) -> torch.dtype:
    """Return the format in which products are made: the narrowest among their operands."""
    formats = [each.dtype for each in tensors if each.is_floating_point()]
    return min(formats, key=lambda dtype: dtype.itemsize, default=torch.float32)


def _is_unaligned(tensors: Sequence[Tensor]) -> bool:
    """Return whether rows of half-precision operands begin off 16-byte words, which the fast kernels do not serve."""
    return any(size % 8 for each in tensors[-2:] if each.dtype.itemsize == 2 for size in each.shape[-2:])


class Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Total work of a step's operators on a card."""

    def __init__(self, card: Card, method: str, *, tf32: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._card = card
        self._method = method
        self._tf32 = tf32
        self.operators = 0
        self.kernels = 0
        self.by_family: dict[str, list[float]] = defaultdict(
            lambda: [0.0, 0.0, 0.0, 0.0]
        )  # flops, bytes, calls, seconds
        self._calls: dict[Any, tuple[Any, ...]] = {}  # what `_add` takes, of calls that look alike

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `fake_device.py`

    @contextmanager
    def watching(self) -> Iterator[None]:
        with phases.listening(nullcontext), phases.hearing(self._launched), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_shard_type, types)):
            return NotImplemented
        kwargs = kwargs or {}
        func = as_without_modes(func, args, sys._getframe().f_back)
        out = func(*args, **kwargs)
        self.operators += 1
        key = key_of(func, args, kwargs)
        storages = [each.untyped_storage()._cdata for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        key = None if key is None or len(set(storages)) < len(storages) else (key, phases.innermost())
        call = self._calls.get(key) if key is not None else None
        if call is None:
            call = self._look_at(func, args, kwargs, out)
            if key is not None:
                self._calls[key] = call
        if call:
            self._add(*call)
        return out

    def _look_at(self, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Any, ...]:
        """Return the arguments of `_add` for a call; nothing if the call moves no bytes."""
        moved = moved_by(func, args, kwargs, out, "cuda")
        if not any(moved):
            return ()
        tensors = [each for each in args if isinstance(each, Tensor)]
        family = operator_family(operator_name(func), [each.shape for each in tensors], phases.innermost())
        if family == GEMM:
            convolves = "convolution" in operator_name(func)
            family = CONVOLUTION if convolves else UNALIGNED if _is_unaligned(tensors) else GEMM
        return family, _format_of(tensors), flops_of(func, args, kwargs, out), sum(moved)

    def _launched(self, launch: phases.Launch) -> None:
        moved = sum(map(tensor_bytes, distinct_tensors([*launch.reads, *launch.writes])))
        self.operators += 1
        self._add(launch.family, _format_of(launch.reads), launch.flops, moved)

    def _add(self, family: str, dtype: torch.dtype, flops: int, moved: int) -> None:
        seconds = max(self._computing(family, dtype, flops), moved / (MOVING * self._card.bytes_per_second)) + BEGINNING
        total = self.by_family[family]
        for place, value in enumerate((flops, moved, 1, seconds)):
            total[place] += value
        self.kernels += 1

    def _computing(self, family: str, dtype: torch.dtype, flops: int) -> float:
        attends = family == ATTENTION  # in float32 without tensor cores
        kind, rate = self._card.flops_of(dtype, tf32=self._tf32 and not attends)
        return flops / (rate * (ATTENDING if attends else PRODUCTS[kind] * SLOWER.get(family, 1.0)))

    @property
    def gpu_seconds(self) -> float:
        return sum(total[3] for total in self.by_family.values())

    @property
    def host_seconds(self) -> float:
        convolutions = self.by_family[CONVOLUTION][2]
        return self.operators * HOST * HOST_OF.get(self._method, 1.0) + convolutions * HOST_CONVOLVING

    @property
    def seconds(self) -> float:
        return slower_of(self.gpu_seconds, self.host_seconds)
