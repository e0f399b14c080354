"""Slots, one for each trainable parameter: they collect contributions until the micro-batch closes.

Hooks on parameters (`p.register_hook`, `p.register_post_accumulate_grad_hook`) are called with the ordinary gradient,
which flash clipping never computes. A hook that scales, masks or logs it would silently not run, so hooks are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import nn

from dpscope.errors import UserError
from dpscope.flash.gradients.contributions import Contribution
from dpscope.flash.gradients.paths import Decision
from dpscope.flash.torch_side.attributes import temporarily
from dpscope.flash.torch_side.shards import is_whole_of

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
        """Return True if `parameter` is this slot's own, the whole one of which that is a shard, or made up for it."""
        if getattr(parameter, "is_made_up", False):
            return True
        if self.whole is None and is_whole_of(parameter, self.parameter):
            self.whole = parameter
        return parameter is not None and (parameter is self.parameter or parameter is self.whole)

    def take(self) -> list[Contribution]:
        """Return the contributions and remove them from this slot."""
        taken, self.contributions = self.contributions, []
        return taken


class OwnGradients:
    """Gradients of parameters that the engine asks autograd for itself: hooks on parameters see them, too."""

    are_taken = False  # not by thread: autograd calls hooks in threads of its own

    @contextmanager
    def taken(self) -> Iterator[None]:
        with temporarily(self, are_taken=True):
            yield


OWN_GRADIENTS = OwnGradients()


def refuse_hooks(slots: Iterable[Slot], *, guards: int) -> None:
    """Raise UserError if a parameter has a hook. `guards`: how many are the engine's own."""
    for slot in slots:
        parameter = slot.parameter
        hooks = len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())
        if hooks > guards:
            raise UserError(
                f"{slot.name} has a gradient hook, which flash clipping would never call because it makes no ordinary "
                "gradient: remove the hook, and change the private gradient before the optimizer's update instead"
            )
