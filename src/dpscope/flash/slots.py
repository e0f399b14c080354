"""A slot for each trainable parameter: where what backward passes leave for it gathers until the micro-batch closes."""

from __future__ import annotations

from torch import nn

from dpscope.flash.contributions import Contribution, Kept
from dpscope.flash.paths import Decision


class Slot:
    __slots__ = ("contributions", "decision", "kind", "module", "name", "parameter", "shapes", "why")

    def __init__(self, name: str, parameter: nn.Parameter, module: str) -> None:
        self.name = name
        self.parameter = parameter
        self.module = module
        self.contributions: list[Contribution] = []
        # For explain(): what was seen last.
        self.kind = ""
        self.shapes = ""
        self.why = "not reached by a backward pass yet"
        self.decision: Decision | None = None

    def describe(self, kind: str, shapes: str, why: str) -> None:
        self.kind, self.shapes, self.why = kind, shapes, why

    def add(self, contribution: Contribution) -> None:
        """Per-sample gradients are added into those that are there, where that is possible: only one need be held."""
        held = self.contributions
        if not (held and isinstance(contribution, Kept) and held[-1].absorb(contribution, self.parameter.dtype)):
            held.append(contribution)

    def take(self) -> list[Contribution]:
        """The contributions, which are no longer here afterwards."""
        taken, self.contributions = self.contributions, []
        return taken
