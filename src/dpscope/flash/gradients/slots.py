"""Slots, one for each trainable parameter: they collect contributions until the micro-batch closes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from dpscope.flash.gradients.contributions import Contribution
from dpscope.flash.gradients.paths import Decision
from dpscope.flash.torch_side.shards import is_sharded

NO_SHAPES: Mapping[str, torch.Size] = MappingProxyType({})


class Slot:
    __slots__ = ("contributions", "decision", "kind", "module", "name", "parameter", "shapes", "whole", "why")

    decision: Decision | None

    def __init__(self, name: str, parameter: nn.Parameter, module: str) -> None:
        self.name = name
        self.parameter = parameter
        self.module = module
        self.contributions: list[Contribution] = []
        self.whole: nn.Parameter | None = None  # what FSDP2 puts in the place of a shard around forward
        self.describe("", "not reached by a backward pass yet")

    def describe(self, kind: str, why: str | Decision, shapes: Mapping[str, torch.Size] = NO_SHAPES) -> None:
        """Record the last contribution and its path, for explain()."""
        self.kind, self.shapes = kind, shapes
        self.decision, self.why = (None, why) if isinstance(why, str) else (why, why.reason)

    def add(self, contribution: Contribution) -> None:
        """Add a contribution. Per-sample gradients are added into those that are held already, if possible."""
        held = self.contributions
        if not (held and held[-1].absorb(contribution, self.parameter.dtype)):
            held.append(contribution)

    def stands_for(self, parameter: nn.Parameter | None) -> bool:
        """Return True if `parameter` is this slot's own, or the whole one of which that is a shard."""
        if self.whole is None and self._is_whole(parameter):
            self.whole = parameter
        return parameter is not None and (parameter is self.parameter or parameter is self.whole)

    def _is_whole(self, parameter: nn.Parameter | None) -> bool:
        return (
            is_sharded(self.parameter)
            and parameter is not None
            and type(parameter) in (nn.Parameter, FakeTensor)  # the latter in a dry run
            and parameter.shape == self.parameter.shape
            and parameter.requires_grad == self.parameter.requires_grad
        )

    def take(self) -> list[Contribution]:
        """Return the contributions and remove them from this slot."""
        taken, self.contributions = self.contributions, []
        return taken
