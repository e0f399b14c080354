"""The tracker's record: every storage from birth to death, and the events of their lives in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import CodeType

from torch.utils.weak import TensorWeakRef

from dpscope.instruments.memory.code_lines import CodeLine

BEFORE_STEP = ""  # the operator of a storage that was there before the step
OUTSIDE_PHASES = "step"  # the phase of what happens outside every phase

BORN, DIED, RESIZED, RELEASED = range(4)
StorageEvent = tuple[int, int, int]  # (kind, index of the life, bytes: of a birth or after a resize)


@dataclass(frozen=True, kw_only=True)
class Birth:
    """Birth of a storage: all that a component rule is given.

    operator    the operator that made it, as `aten::mm`; empty for what was there before the step
    phase       forward, backward, clip, noise, optimizer; `step` outside of them
    module      path of the module it was made for, as `blocks.3.up`: the one whose forward ran, or, in a backward pass,
                the one whose forward made the node that ran; empty if there is none
    code        the innermost Python function outside torch that asked for it, as `package.module:function`
    function    the same, as Python's code object
    line        the Python line that asked for it; of what autograd's engine makes, the line of the forward pass that it
                goes back through, None if there is none
    by_autograd autograd's engine made it, for that line
    shape       of the tensor it first appeared as
    dtype       likewise, as `float32`
    nbytes      its size at birth
    recomputed  made by a forward that ran again inside a backward pass (activation checkpointing)
    """

    operator: str
    phase: str
    module: str
    code: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    recomputed: bool = False
    function: CodeType | None = None
    line: CodeLine | None = None
    by_autograd: bool = False


class Life:
    """One storage: its birth, its owner, who keeps it, and the saved tensors of autograd that hold it."""

    __slots__ = ("birth", "first", "index", "kept", "module", "nbytes", "owner", "saves", "was_saved")

    def __init__(self, index: int, birth: Birth, first: TensorWeakRef) -> None:
        self.index = index
        self.birth = birth
        self.first = first  # the tensor it first appeared as
        self.nbytes = birth.nbytes  # now
        self.module = birth.module
        self.owner: str | None = None  # the component of who holds it for good
        self.kept = False  # the method was seen to hold it beyond what autograd does
        self.saves = 0  # saved tensors of autograd's graph that hold it now
        self.was_saved = False


@dataclass
class Record:
    lives: list[Life] = field(default_factory=list)
    events: list[StorageEvent] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)  # (number of events before it, phase that begins)

    @property
    def start(self) -> int:
        """The event after which everything from before the step is counted."""
        return max(0, self.marks[0][0] - 1) if self.marks else 0

    def last_releases(self) -> list[int | None]:
        """Return for each life the last event at which autograd released it; None if there is none."""
        found: list[int | None] = [None] * len(self.lives)
        for event, (kind, index, _) in enumerate(self.events):
            if kind == RELEASED and not self.lives[index].saves:
                found[index] = event
        return found

    def totals(self) -> list[int]:
        """Return the live bytes after each event, counted without components, which have to add up to them."""
        sizes = [0] * len(self.lives)
        totals, total = [], 0
        for kind, index, nbytes in self.events:
            if kind != RELEASED:
                size = 0 if kind == DIED else nbytes
                total += size - sizes[index]
                sizes[index] = size
            totals.append(total)
        return totals
