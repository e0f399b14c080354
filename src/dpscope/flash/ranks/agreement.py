"""Messages between ranks besides gradients: refusals, the operation that each is about to do, the step's key.

They go through the host (gloo), a few bytes at a time, so that no rank waits for its device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dpscope.errors import UserError
from dpscope.flash.kernels.tensor_lists import as_word
from dpscope.units import list_names

_ENDED = "another process has ended or cannot be reached; look for the first error of the others"
_LATE = (
    "another rank did not come to the same point before the group's timeout: it waits elsewhere (a barrier or an "
    "evaluation that not all ranks do), has left its loop early, or takes too long; every rank has to do the same"
)
_SAME = (
    "every rank has to do the same, whatever its own share or loss is: an empty share is trained on, too, and never "
    "skipped"
)
WHAT = "what to do"  # the fact that comes first: an infinitive
TRAINED = "trained parameters"  # names

RankFacts = Mapping[str, Any]  # what a rank is about to do, and with which settings


class LostRank(UserError):
    """Error for a process that has ended, cannot be reached, or does not arrive."""


@contextmanager
def naming_lost_ranks(doing: str) -> Iterator[None]:
    """Turn an error of a collective inside the block into a sentence that says what the rank was doing."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        why = _LATE if "timed out" in said.lower() or "timeout" in said.lower() else _ENDED
        raise LostRank(f"rank {dist.get_rank()} could not go on {doing}: {why} ({said})") from error


def told(error: Exception) -> Exception:
    """Mark an error that every rank raises."""
    error.dpscope_told = True  # type: ignore[attr-defined]
    return error


def _is_told(error: BaseException | None) -> bool:
    """Return True if the error is marked so, or was raised while such an error was handled."""
    return error is not None and (getattr(error, "dpscope_told", False) or _is_told(error.__context__))


class Control:
    """A process group of all ranks on the host. Without one nobody else is there to agree with."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size, self._group = rank, size, group
        self.alone = group is None
        self.models = 0  # made private so far
        self.shares_given = 0  # by the loader of Poisson batches, to the loop on this rank

    def gather(
        self, value: Any, failure: str | None = None, what: str = "compare models and settings (make_private)"
    ) -> list[Any]:
        """Return the value of every rank. Raise UserError if another rank reports a failure instead."""
        self.meet({WHAT: what})
        return self._gather(value, failure)

    def _gather(self, value: Any, failure: str | None = None) -> list[Any]:
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        with naming_lost_ranks("telling the other ranks"):
            dist.all_gather_object(values, (value, failure), group=self._group)
        for rank, (_, message) in enumerate(values):
            if message is not None and failure is None:
                raise told(UserError(f"rank {rank}: {message}"))
        return [theirs for theirs, _ in values]

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, in place. On the CPU."""
        if not self.alone:
            with naming_lost_ranks("asking rank 0"):
                dist.broadcast(tensor, src=0, group=self._group)
        return tensor

    def meet(self, facts: RankFacts, key: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """Wait for all ranks to arrive. Return rank 0's key. Raises UserError on all of them where facts differ.

        24 bytes a rank: a digest of the facts, and the key. The facts themselves are sent only if digests differ.
        """
        if self.alone:
            return key
        digest = blake2b(repr(facts).encode(), digest_size=8).digest()
        own = torch.tensor([int.from_bytes(digest, "little", signed=True), *map(as_word, key)])
        rows = torch.empty(self.size, 3, dtype=torch.int64)
        with naming_lost_ranks(f"to {facts[WHAT]}"):
            dist.all_gather(list(rows.unbind()), own, group=self._group)
        if bool((rows[:, 0] != rows[0, 0]).any()):
            raise told(UserError(_difference(self._gather(facts))))
        seed, offset = (word % 2**64 for word in rows[0, 1:].tolist())
        return seed, offset

    def add_up(self, value: float) -> float:
        """Return the sum of every rank's value, the same on all of them."""
        return math.fsum(self._gather(value))

    def agree(self, what: str, facts: Sequence[str]) -> None:
        """Raise UserError on all ranks if `facts` differ between them."""
        everyone = self.gather(tuple(facts))
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                one, other = next(
                    ((a, b) for a, b in zip(everyone[0], theirs, strict=False) if a != b),
                    (f"{len(everyone[0])} entries", f"{len(theirs)} entries"),
                )
                raise told(UserError(f"ranks 0 and {rank} differ in {what}: {one!r} and {other!r}"))

    @contextmanager
    def refusing_together(self) -> Iterator[None]:
        """Raise an error inside, on any rank, on all of them."""
        try:
            yield
        except Exception as error:
            if not _is_told(error):
                self.gather(None, failure=str(error) or type(error).__name__)
                told(error)
            raise
        self.gather(None)


_controls: dict[Any, Control] = {}  # by default process group: there is one at a time


def control() -> Control:
    """Return the control group of the default process group. All ranks have to make the first call together."""
    world = dist.group.WORLD
    if world not in _controls:
        _controls.clear()
        alone = dist.get_world_size() == 1 or dist.get_backend() == "fake"  # of a simulated world
        group = None if alone else dist.new_group(backend="gloo", timeout=_timeout())
        _controls[world] = Control(dist.get_rank(), dist.get_world_size(), group)
    return _controls[world]


def _timeout() -> timedelta | None:
    """Return the timeout of the default process group; None for torch's default."""
    try:
        backend: Any = dist.group.WORLD._get_backend(torch.device("cuda" if dist.get_backend() == "nccl" else "cpu"))  # type: ignore[union-attr]
        timeout: timedelta = backend.options._timeout
    except (AttributeError, RuntimeError):  # neither is part of torch's promises
        return None
    return timeout


def _difference(everyone: Sequence[RankFacts]) -> str:
    """Describe the first difference between the facts of rank 0 and those of another rank."""
    first = everyone[0]
    rank, other = next((rank, facts) for rank, facts in enumerate(everyone) if repr(facts) != repr(first))
    if first[WHAT] != other[WHAT]:
        return f"rank 0 is about to {first[WHAT]}, and rank {rank} to {other[WHAT]}: {_SAME}"
    name = next(name for name in {**first, **other} if repr(first.get(name)) != repr(other.get(name)))
    here, there = first.get(name), other.get(name)
    if name == TRAINED and isinstance(here, tuple) and isinstance(there, tuple):
        apart = [(0, each) for each in here if each not in there] + [(rank, each) for each in there if each not in here]
        trains = apart[0][0]
        names = list_names([each for owner, each in apart if owner == trains])
        return f"{names} is trained on rank {trains} and not on rank {rank - trains}: freeze the same on every rank"
    return f"ranks 0 and {rank} differ in {name}: {here!r} and {there!r}; {_SAME}"
