"""The processes that train one model together, as an engine sees them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dpscope.flash.distributed import is_initialised
from dpscope.flash.instance_method import InstanceMethod
from dpscope.flash.ranks.agreement import Control, control, explain_lost_ranks
from dpscope.flash.ranks.layout import Layout, is_fsdp, is_spread, layout_of, require_initialised
from dpscope.flash.ranks.reduction import Reduction
from dpscope.flash.ranks.stand_ins import without_collectives


class WrapperTap(InstanceMethod):
    """DDP's forward, without its own reduction of gradients: clipped sums are reduced by the engine."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self.module, DistributedDataParallel)
        with self.module.no_sync():
            return self.original(*args, **kwargs)


class Ranks:
    """To be made on all ranks at once."""

    def __init__(self, layout: Layout, control: Control) -> None:
        self.layout = layout
        self.control = control
        self.reduction = Reduction(layout)
        explain_lost_ranks()

    @property
    def module(self) -> nn.Module:
        """The model without DDP's wrapper."""
        return self.layout.module

    def agree_on(self, optimizer: Optimizer) -> None:
        """Raises UserError on all ranks where their optimizers would not do the same.

        The order of parameters counts: sums travel, and elements are numbered for noise, in it.
        """
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        facts = [type(optimizer).__name__]
        for number, group in enumerate(optimizer.param_groups):
            plain = ((key, value) for key, value in group.items() if isinstance(value, (int, float, str)))
            facts += [f"group {number}: {key}={value}" for key, value in plain]
            facts += [f"group {number}: {names.get(parameter, '?')}" for parameter in group["params"]]
        self.control.agree("the optimizer (its options, or the order of its parameters)", facts)

    def taps(self) -> list[InstanceMethod]:
        """What stands in for the wrapper's forward."""
        wrapper = self.layout.wrapper
        return [WrapperTap(wrapper)] if isinstance(wrapper, DistributedDataParallel) else []

    def rehearsing(self) -> AbstractContextManager[None]:
        """Inside, forward passes do not communicate."""
        return nullcontext() if self.layout.mesh is None else without_collectives(self.module)


def ranks_of(model: nn.Module) -> Ranks | None:
    """The processes over which the model is spread; None for one that is whole in this one.

    Raises UserError, on all ranks, where it is spread in a way that cannot be trained, or not equally on all ranks.
    """
    if not is_spread(model):
        layout_of(model)  # refuses what no process group is needed to refuse
        return None
    reshard(model)
    require_initialised()
    link = control()
    with link.refusing_together():
        layout = layout_of(model)
        assert layout is not None
    link.agree("the model", layout.describe())
    return Ranks(layout, link)


def refusing_together(model: nn.Module) -> AbstractContextManager[None]:
    """An error inside, on any rank over which the model is spread, is raised on all of them."""
    return control().refusing_together() if is_spread(model) and is_initialised() else nullcontext()


def reshard(model: nn.Module) -> None:
    """Put the sharded parameters back where a forward pass has left whole ones: the root's stay after it."""
    for module in model.modules():
        if is_fsdp(module):
            module.reshard()  # type: ignore[operator]
