"""What ranks tell one another beside gradients: refusals, the step's key, where a generator stands.

It goes through the host (gloo), a few bytes at a time, so that no rank waits for its device.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpscope.errors import UserError

_WORD = 2**64
_LOST_RANK = "another process has ended or cannot be reached; look for the first error of the others"


class LostRank(UserError):
    """Another process has ended, or cannot be reached."""


@contextmanager
def naming_lost_ranks(doing: str) -> Iterator[None]:
    """An error of a collective, inside, becomes a sentence."""
    try:
        yield
    except RuntimeError as error:
        raise LostRank(
            f"rank {dist.get_rank()} could not go on {doing}: {_LOST_RANK} "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error


# What gloo, NCCL and torch's stores say when the other side is gone.
_LOST = re.compile(r"Connection (closed|reset|refused)|Broken pipe|NCCL|timed out|Timed out", re.IGNORECASE)


def explain_lost_ranks() -> None:
    """From now on an error of FSDP2's own collectives that ends this process is followed by a sentence."""
    before = sys.excepthook
    if getattr(before, "explains_lost_ranks", False):
        return

    def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, RuntimeError) and _LOST.search(str(error)) and dist.is_initialized():
            print(f"dpscope: rank {dist.get_rank()} ends: {_LOST_RANK}", file=sys.stderr)

    explain.explains_lost_ranks = True  # type: ignore[attr-defined]
    sys.excepthook = explain


def _told(error: Exception) -> Exception:
    """Marks an error that every rank raises."""
    error.dpscope_told = True  # type: ignore[attr-defined]
    return error


def _is_told(error: BaseException | None) -> bool:
    """Whether it is such an error, or was raised in place of one."""
    return error is not None and (getattr(error, "dpscope_told", False) or _is_told(error.__context__))


class Control:
    """A process group of all ranks on the host. To be made on all ranks at once."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        # In a simulated world nobody else is there to agree with.
        self.alone = self.size == 1 or dist.get_backend() == "fake"
        self._group = None if self.alone else dist.new_group(backend="gloo")
        self.shares_given = 0  # by the loader of Poisson batches, to the loop on this rank

    def gather(self, value: Any, failure: str | None = None) -> list[Any]:
        """The value of every rank. Raises UserError where one of the others reports a failure instead."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        with naming_lost_ranks("telling the other ranks"):
            dist.all_gather_object(values, (value, failure), group=self._group)
        for rank, (_, message) in enumerate(values):
            if message is not None and failure is None:
                raise _told(UserError(f"rank {rank}: {message}"))
        return [theirs for theirs, _ in values]

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, in place. On the CPU."""
        if not self.alone:
            with naming_lost_ranks("asking rank 0"):
                dist.broadcast(tensor, src=0, group=self._group)
        return tensor

    def key_of_step(self, key: tuple[int, int], facts: Sequence[float]) -> tuple[int, int]:
        """Rank 0's key. Raises UserError on all ranks where `facts` of the step are not the same on all of them."""
        if self.alone:
            return key
        facts = (*facts, self.shares_given)
        bits = struct.unpack(f"<{len(facts)}q", struct.pack(f"<{len(facts)}d", *facts))
        own = torch.tensor([*((word + _WORD // 2) % _WORD - _WORD // 2 for word in key), *bits], dtype=torch.int64)
        rows = torch.empty(self.size, len(own), dtype=torch.int64)
        with naming_lost_ranks("agreeing on a step's noise"):
            dist.all_gather(list(rows.unbind()), own, group=self._group)
        apart = (rows[:, 2:] != rows[0, 2:]).any(1).nonzero().flatten().tolist()
        if apart:
            one, other = (rows[rank, 2:].view(torch.float64).tolist() for rank in (0, apart[0]))
            raise UserError(
                f"ranks 0 and {apart[0]} are not about to do the same step: standard deviation of the noise, "
                "1 / divisor, clipping bound, learning rates (added up) and shares taken from the loader are "
                f"{one} and {other}; they have to be the same everywhere, whatever a rank's own loss or share is: an "
                "empty share is trained on, too, and never skipped"
            )
        seed, offset = (word % _WORD for word in rows[0, :2].tolist())
        return seed, offset

    def agree(self, what: str, facts: Sequence[str]) -> None:
        """Raises UserError on all ranks where `facts` are not the same on all of them."""
        everyone = self.gather(tuple(facts))
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                one, other = next(
                    ((a, b) for a, b in zip(everyone[0], theirs, strict=False) if a != b),
                    (f"{len(everyone[0])} entries", f"{len(theirs)} entries"),
                )
                raise _told(UserError(f"ranks 0 and {rank} differ in {what}: {one!r} and {other!r}"))

    @contextmanager
    def refusing_together(self) -> Iterator[None]:
        """An error inside, on any rank, is raised on all of them."""
        try:
            yield
        except Exception as error:
            if not _is_told(error):
                self.gather(None, failure=str(error) or type(error).__name__)
                _told(error)
            raise
        self.gather(None)


_controls: dict[Any, Control] = {}  # by default process group: there is one at a time


def control() -> Control:
    """The control group of the default process group. The first call is to be made on all ranks at once."""
    world = dist.group.WORLD
    if world not in _controls:
        _controls.clear()
        _controls[world] = Control()
    return _controls[world]
