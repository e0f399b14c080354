"""The processes that train one model, as an engine sees them: several ranks, or one process that has all of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dpscope.errors import UserError
from dpscope.flash.combinations import SECURE_RANKS
from dpscope.flash.ranks.agreement import TRAINED, WHAT, Control, RankFacts, control, told
from dpscope.flash.ranks.layout import (
    Layout,
    is_fsdp,
    is_initialised,
    is_spread,
    layout_of,
    require_initialised,
)
from dpscope.flash.ranks.local_module import made_up_weights, whole_weights
from dpscope.flash.ranks.reduction import Reduction
from dpscope.flash.torch_side.attributes import temporarily
from dpscope.flash.torch_side.frames import outside_graphs, skip_frame, uncut_graphs
from dpscope.flash.torch_side.instance_method import InertHook, InstanceMethod
from dpscope.flash.torch_side.shards import cut_of, is_sharded, local

_SPREAD_FIRST = "wrap the model in DistributedDataParallel, or shard it with fully_shard, and call make_private then"
WHOLE_SAMPLES = "give all rows of a sample to one physical batch of a step, or its share is counted twice"
BlockNames = dict[tuple[int, int], set[str]]  # number of a block that runs again -> names of its parameters


class WrapperTap(InstanceMethod):
    """DDP's forward, without its own reduction of gradients: clipped sums are reduced by the engine.

    torch.compile would cut graphs where DDP reduces gradients. There is nothing to wait for here.
    """

    @skip_frame
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self.module, DistributedDataParallel)
        with self.module.no_sync(), uncut_graphs():
            return self.original(*args, **kwargs)


Key = tuple[int, int]  # of a step's noise


class Ranks:
    """Processes that train one model, made on all of them at once; or one process, which waits for nobody.

    given            the model as the user has it, perhaps compiled, without DDP's wrapper
    module           the model itself
    several          whether the model is spread over processes
    gathers_weights  whether each of them holds a part of the parameters, and gathers them to run a module
    """

    def __init__(self, layout: Layout, control: Control) -> None:
        self.given, self.wrapper, self.module = layout.given, layout.wrapper, layout.module
        self.gathers_weights = layout.mesh is not None
        self.several = layout.is_spread
        self.control = control
        self.reduction = Reduction(layout)
        self._layout = layout
        self._loads = self._compared_loads = 0  # of states, since make_private
        control.models += 1
        self._model = control.models  # its number: ranks that train several may step another one
        self._names = {parameter: name for name, parameter in self.module.named_parameters()}
        self._met = False  # to take the step that runs
        self._is_apart = False

    def refuse_processes(self, *, secure_mode: bool = False) -> None:
        """Refuse processes of which each would add noise of its own."""
        if self.several and secure_mode:
            raise SECURE_RANKS.error()
        if not self.several and is_initialised() and (processes := dist.get_world_size()) > 1:
            raise UserError(
                f"torch.distributed runs {processes} processes, and nothing spreads the model over them: gradients are "
                f"not exchanged, so the models of the processes would drift apart; {_SPREAD_FIRST}"
            )

    def refuse_wrapper(self) -> None:
        """Refuse a forward pass inside a wrapper that exchanges gradients. Known ones do not (`WrapperTap`)."""
        if not self.several and getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
            raise UserError(
                "the private model is inside DistributedDataParallel, which exchanges gradients that were not clipped; "
                f"{_SPREAD_FIRST}"
            )

    def agree_on(self, optimizer: Optimizer) -> None:
        """Raise UserError on all ranks if their optimizers differ.

        The order of parameters counts, because sums travel and noise numbers elements in that order.
        """
        facts = [type(optimizer).__name__]
        for number, group in enumerate(optimizer.param_groups):
            plain = ((key, value) for key, value in group.items() if isinstance(value, (int, float, str)))
            facts += [f"group {number}: {key}={value}" for key, value in plain]
            facts += [f"group {number}: {self._names.get(parameter, '?')}" for parameter in group["params"]]
        self.control.agree("the optimizer (its options, or the order of its parameters)", facts)

    # -- before anything travels: is every rank about to do the same? --------------------------------------------------

    def watch_forwards(self) -> list[RemovableHandle]:
        """Make all ranks begin each forward pass of a sharded model together: it needs the weights of the others."""
        if not self.gathers_weights:
            return []

        @outside_graphs("flash clipping: ranks meet outside of graphs")
        def meet(module: nn.Module, args: Any) -> None:
            if not self._is_apart:
                kind = "" if torch.is_grad_enabled() else " without gradients"
                self.control.meet(self._facts(f"run a forward pass{kind}"))

        return [self.module.register_forward_pre_hook(meet, prepend=True)]

    def watch_loads(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Count the states that are loaded into the model or its optimizer, so that ranks can compare."""

        def count() -> None:
            self._loads += 1

        hook = InertHook(count)
        return [
            self.module.register_load_state_dict_post_hook(hook),  # type: ignore[no-untyped-call]
            optimizer.register_load_state_dict_post_hook(hook),
        ]

    def meet_to_step(
        self, doing: str, optimizer: Optimizer, facts: Callable[[], RankFacts], draw: Callable[[], Key]
    ) -> Key | None:
        """Wait for all ranks to take the same step with the same settings. Return rank 0's key; None without others."""
        if self.control.alone:
            return None
        key = self.control.meet(
            {
                **self._facts(doing),
                "shares taken from the loader": self.control.shares_given,
                "states loaded into the model or the optimizer since make_private": self._loads,
                **facts(),
                **dict(_settings(optimizer)),
            },
            draw(),
        )
        if self._loads != self._compared_loads and not self.gathers_weights:
            self._compared_loads = self._loads
            _agree_on_values(self.control, self._layout)
        self._met = True
        return key

    def meet_to_reduce(self) -> None:
        """Wait for all ranks to reduce sums, unless they already met for a step."""
        met, self._met = self._met, False
        if not met:
            self.control.meet(self._facts("add up a micro-batch before the step"))

    def agree_on_blocks(self, own: list[BlockNames]) -> list[BlockNames]:
        """Return the blocks that any rank runs again, last ones first: number -> names of their parameters.

        `own`: those of this rank, in several lists that are kept apart.
        """
        if not self.gathers_weights:
            return own
        found: list[BlockNames] = [{} for _ in own]
        for lists in self.control.gather(own, what="agree on checkpointed blocks to run again"):
            for blocks_of_all, theirs in zip(found, lists, strict=True):
                for number, names in theirs.items():
                    blocks_of_all.setdefault(number, set()).update(names)
        return [dict(sorted(each.items(), reverse=True)) for each in found]

    def names_inside(self, module: nn.Module | None) -> set[str]:
        """Return the names of the parameters that `whole_weights` has to gather to run a module."""
        return (
            {self._names[each] for each in module.parameters()}
            if self.gathers_weights and module is not None
            else set()
        )

    def whole_weights(self, names: Collection[str]) -> AbstractContextManager[None]:
        """Gather the weights of the sharded modules that own these parameters. All ranks have to do it together."""
        if not self.gathers_weights:
            return nullcontext()
        owners = dict.fromkeys(
            self.reduction.owners[parameter] for parameter, name in self._names.items() if name in names
        )
        return whole_weights([owner for owner in owners if owner is not None])

    def add_up(self, value: float, noise: float) -> float:
        """Return the sum of every rank's value, with the noise of one of them."""
        return self.control.add_up(value + (noise if self.control.rank == 0 else 0.0))

    def ids_of_all(self, own: frozenset[int]) -> frozenset[int]:
        """Return the ids of samples on all ranks. Raise UserError on all of them if two have rows of one sample."""
        owners: dict[int, int] = {}
        for rank, theirs in enumerate(self.control.gather(sorted(own), what="group rows")):
            for each in theirs:
                if (first := owners.setdefault(each, rank)) != rank:
                    raise told(UserError(f"ranks {first} and {rank} both have rows of sample {each}: {WHOLE_SAMPLES}"))
        return frozenset(owners)

    def _facts(self, doing: str) -> dict[str, Any]:
        trained = tuple(name for parameter, name in self._names.items() if parameter.requires_grad)
        return {WHAT: doing, "the number of the model": self._model, TRAINED: trained}

    # -- forward passes ------------------------------------------------------------------------------------------------

    def taps(self) -> list[InstanceMethod]:
        """Return the method that replaces the wrapper's forward."""
        return [WrapperTap(self.wrapper)] if isinstance(self.wrapper, DistributedDataParallel) else []

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Keep forward passes inside the block from communicating."""
        local = made_up_weights(self.module) if self.gathers_weights else nullcontext()
        with temporarily(self, _is_apart=True), local:
            yield


def _settings(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the plain settings of the parameter groups (numbers and words), tensors as their values."""
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params" and isinstance(value := _plain(value), (int, float, str, tuple, type(None))):
                yield f"{name} of group {number}", value


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _plain(local(value).tolist()) if value.numel() <= 64 else None
    return tuple(map(_plain, value)) if isinstance(value, (tuple, list)) else value


def _agree_on_values(link: Control, layout: Layout) -> None:
    """Raise UserError on all ranks if two of them hold different values of the same parameter or shard.

    They compare the sum of the bits of each (parameter, shard), which does not depend on their order.
    """
    if link.alone:
        return
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    own: dict[tuple[str, int], Tensor] = {}
    for name, parameter in layout.module.named_parameters():
        part = local(parameter.detach())
        shard = cut_of(parameter).rank if is_sharded(parameter) else 0
        if part.is_complex():
            part = torch.view_as_real(part)
        own[name, shard] = part.view(bits[part.element_size()]).sum(dtype=torch.int64).cpu()
    seen: dict[tuple[str, int], tuple[int, int]] = {}  # rank and digest
    for rank, digests in enumerate(link.gather({where: int(total) for where, total in own.items()})):
        for where, digest in digests.items():
            first, expected = seen.setdefault(where, (rank, digest))
            if digest != expected:
                raise told(
                    UserError(
                        f"ranks {first} and {rank} hold different values of {where[0]}, of which each has a copy: "
                        "initialise or load the model equally on every rank"
                    )
                )


def ranks_of(model: nn.Module) -> Ranks:
    """Return the processes over which the model is spread.

    Raise UserError on all ranks if the layout cannot be trained, or differs between ranks.
    """
    if not is_spread(model):
        return Ranks(layout_of(model), Control())
    release_weights(model)
    require_initialised()
    link = control()
    with link.refusing_together():
        layout = layout_of(model)
    link.agree("the model", layout.describe())
    _agree_on_values(link, layout)
    return Ranks(layout, link)


def refusing_together(model: nn.Module) -> AbstractContextManager[None]:
    """Raise an error inside, on any rank over which the model is spread, on all of them."""
    release_weights(model)
    return control().refusing_together() if is_spread(model) and is_initialised() else nullcontext()


def release_weights(model: nn.Module) -> None:
    """Put sharded parameters back in place of whole ones, which FSDP2 leaves in the root after a forward pass."""
    for module in model.modules():
        if is_fsdp(module):
            module.reshard()  # type: ignore[operator]
