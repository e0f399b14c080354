"""Schedule of later checks: samples may begin to mix, and layers to change, after the first batch.

A new kind of call is checked completely. After that rows are checked again at passes 2, 4, 8, 16, … and at random ones,
every fourth time with the self-test, on a quarter of the batch. Instruments pause these checks while they measure.
"""

from __future__ import annotations

import random

RANDOM_SHARE = 1 / 1000
"""Of passes that are looked at besides."""
SMALL_BATCH = 8
"""Below, a look costs more than half a step: every second one is left out."""


class LookSchedule:
    def __init__(self) -> None:
        self.passes = 0
        self.looks: list[int] = []  # passes at which the model was looked at again
        self._due = False
        self.paused = False
        self._wanted = False  # a pass to be looked at was about to run in a graph, or empty
        self._random = random.Random()

    def begin_pass(self) -> None:
        """Count a forward pass that is trained on."""
        self.passes += 1
        power_of_two = self.passes > 1 and self.passes & (self.passes - 1) == 0
        self._due = power_of_two or self._wanted or (self.passes > 1 and self._random.random() < RANDOM_SHARE)
        self._wanted = False

    def count_replay(self) -> bool:
        """Count a pass that a graph runs. Return False, and count nothing, if it is due for a check."""
        self.begin_pass()
        if self._due and not self.paused:
            self.passes -= 1
            self._wanted = True
            return False
        return True

    def begin_again(self) -> None:
        """Undo the count of a pass that begins again with other taps."""
        self.passes -= 1

    def is_due(self, batch: int) -> bool:
        """Return whether the current pass is due for a check. An empty batch shows nothing: the next pass is."""
        if not self._due or self.paused:
            return False
        self._due = False
        if not batch:
            self._wanted = True
            return False
        even = (self.passes.bit_length() - 1) % 2 == 0
        return batch >= SMALL_BATCH or not even

    def note_look(self) -> bool:
        """Count a check; return whether it includes the self-test."""
        self.looks.append(self.passes)
        return len(self.looks) % 4 == 2

    def pause(self) -> None:
        """Stop all checks from now on: for measurements, which end before training does."""
        self.paused = True
