"""Physical batches of a draw, which an optimizer adds up to one step.

BatchMemoryManager announces each physical batch when its loader draws it, some of them ahead of the loop, and `step()`
takes the announcements in order. A loop may skip a batch or leave an epoch. Then announcements are left over, or sums
wait for a rest that never comes: added to the next draw, a sample could count twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dpscope.errors import UserError


class NumberedDraw(NamedTuple):
    """Number of a pass over the data, and of the draw that was given last."""

    of_pass: int
    number: int


class PhysicalBatches:
    """Announcements of physical batches that have not reached `step()`.

    sampler   the private loader's batch sampler, which counts draws
    ahead     batches that its workers draw ahead of the loop
    """

    def __init__(self, sampler: Any = None, ahead: int = 0) -> None:
        self.sampler = sampler
        self.ahead = ahead
        self._announced: list[tuple[bool, NumberedDraw]] = []
        self._left = 0  # beside that of the last step
        self.summed: NumberedDraw | None = None  # of the last step

    def __len__(self) -> int:
        return len(self._announced)

    def _now(self) -> NumberedDraw:
        return NumberedDraw(getattr(self.sampler, "passes", 0), getattr(self.sampler, "draws_given", 0))

    def is_other(self, draw: NumberedDraw) -> bool | None:
        """Return whether a draw is another one than that of the last step. None: draws are not counted."""
        return draw != self.summed if draw.number else None

    def announce(self, goes_on: bool) -> None:
        """Announce a physical batch of the current draw. `goes_on`: it is not the last one."""
        self._announced.append((goes_on, self._now()))

    def next(self) -> tuple[bool, NumberedDraw]:
        """Return whether the draw of the next step's batch goes on, and the draw. Drop what was left over."""
        of_pass = self._now().of_pass
        kept = [each for each in self._announced if each[1].of_pass == of_pass]
        is_first = len(kept) < len(self._announced) or self.summed is None or self.summed.of_pass != of_pass
        if not is_first and len(kept) > self._left + 1:  # one batch a step is drawn: the loop skipped some
            del kept[: len(kept) - self._left - 1]
        elif (late := len(kept) - self.ahead - 1) > 0 and kept[0][1] != kept[late][1]:
            raise UserError(
                f"BatchMemoryManager drew {late} more than the loop took steps for, so it is not known which draw this "
                "step is of: train on the first batch of a pass, too, and fetch none ahead of the loop; or use "
                "make_private(pad_batches=SIZE) instead, whose batches know their draw"
            )
        self._announced = kept
        return kept[0] if kept else (False, self._now())

    def begin(self) -> None:
        """Note the draw of this step's batch, whose sums are used from now on."""
        _, self.summed = self.next()
        self._left = max(0, len(self._announced) - 1)

    def take(self) -> bool:
        """Return whether the draw of this step's batch goes on. A batch is taken once its step cannot fail any more."""
        goes_on, self.summed = self.next()
        del self._announced[:1]
        self._left = len(self._announced)
        return goes_on
