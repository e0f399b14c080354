"""Any other module that owns parameters: it runs sample by sample, with all it contains.

Each parameter is replaced, inside the module's own forward, by B copies that are one and the same tensor (a view); the
module runs under vmap over samples, each seeing a batch of one; ordinary autograd then gives the copies' gradients,
which are the per-sample gradients. Nothing is computed twice, and random numbers are drawn as usual. If vmap cannot
follow (data-dependent control flow, operators without a batching rule), the samples run one after the other.

Whether its output for a batch is that for its samples one by one is what the self-test finds out, with the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, combinations, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpscope.errors import UserError
from dpscope.flash.gradients.contributions import Kept
from dpscope.flash.gradients.slots import OWN_GRADIENTS, Slot
from dpscope.flash.layers.per_sample import PerSampleTap, parameter_key
from dpscope.flash.layers.sample_call import SampleCall
from dpscope.flash.sample_rows.proxy import NotFollowed, Proxy
from dpscope.flash.taps.recorder import Engine, is_recording, note_call, record
from dpscope.flash.torch_side import dry_run
from dpscope.flash.torch_side.arguments import KEEP_BATCH_FIRST
from dpscope.flash.torch_side.autograd_graph import without_hooks
from dpscope.flash.torch_side.dropout import WithoutDropout
from dpscope.random_states import cuda_devices, random_states_kept

_MOST_OPEN = 4  # arguments of which it is open whether all samples share them
_TOLERANCE = {torch.float64: (1e-4, 1e-4), torch.float32: (1e-3, 1e-3)}  # some modules compute in float32 inside
_HALF_TOLERANCE = 0.05, 0.05


class Expand(torch.autograd.Function):
    """Autograd node that expands p to (B, *shape); backward gives the per-sample gradients to the engine."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, parameter: Tensor, batch: int, tap: OpaqueTap, slot: Slot) -> Tensor:
        note_call(ctx, tap)
        ctx.slot = slot
        return parameter.expand(batch, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, ...]:
        if is_recording(ctx):
            ctx.slot.describe("opaque", ctx.tap.why)
            record(ctx, len(g), lambda: ctx.tap.engine.add(ctx.slot, Kept(g, owned=False)))
        return (None,) * 5


class OpaqueTap(PerSampleTap):
    """Tap that runs the module sample by sample."""

    derives = False  # it is given tensors that are made of parameters, and nothing of the samples

    def __init__(self, engine: Engine, name: str, module: nn.Module) -> None:
        super().__init__(engine, name, module)
        self.dtypes: dict[Any, list[torch.dtype]] = {}  # kind of call -> dtypes of the module's own outputs

    def _parameters_given(self, args: Any, kwargs: Any) -> Proxy | None:
        """Return the first argument that is made of parameters."""
        return next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Proxy)), None)

    def _derive(self, given: Proxy, args: Any, kwargs: Any) -> Any:
        """Run the module once, unchanged: its input has nothing of the samples, so its output depends on parameters."""
        args, kwargs = pytree.tree_map(lambda leaf: leaf.plain if isinstance(leaf, Proxy) else leaf, (args, kwargs))
        with torch.enable_grad():
            output = self.original(*args, **kwargs)
        return pytree.tree_map(lambda leaf: given.derive(leaf) if isinstance(leaf, Tensor) else leaf, output)

    def _own_output(self, sample_call: SampleCall) -> list[Tensor] | None:
        """Run the module on the batch at its first call of a kind: its dtypes and shapes count."""
        kind = sample_call.kind()
        if kind in self.dtypes or dry_run.current() is not None or not sample_call.batch:
            return None
        with self._trying():
            found, _, _ = sample_call.call({}, sample_call.leaves)
        own = [leaf.detach() for leaf in found if isinstance(leaf, Tensor)]
        self.dtypes[kind] = [leaf.dtype for leaf in own]
        return own

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Run the module, which may take gradients itself, and leave nothing."""
        with random_states_kept(cuda_devices(self.module)), OWN_GRADIENTS.taken(), without_hooks():
            yield

    def _compare_shapes(self, output: Any, own: list[Tensor], batch: int) -> None:
        """Refuse rows that are not the samples. An output with one row is shared by all of them."""
        found = [leaf.shape for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        for mine, once in zip_longest(found, (leaf.shape for leaf in own)):
            if mine != once and (not once or not mine or (once[:1], mine[:1], mine[1:]) != ((1,), (batch,), once[1:])):
                raise self.does_not_fit(
                    f"{self.name} ({type(self.module).__name__}) gave {once and tuple(once)} for a batch but "
                    f"{mine and tuple(mine)} from its samples one by one: {KEEP_BATCH_FIRST}"
                )

    def _decide(self, sample_call: SampleCall, whole: dict[str, nn.Parameter]) -> None:
        """Share arguments that have as many rows as there are samples by chance: by what gives the module's own output.

        If nothing does, as in a module that draws random numbers, they are split; the self-test tells.
        """
        batch, mapped, by_loop = sample_call.batch, dict(sample_call.mapped), self.by_loop
        rows = {
            parameter_key(key): each.detach().expand(batch, *each.shape).requires_grad_(each.requires_grad)
            for key, each in whole.items()
        }
        open_ones = sample_call.open_arguments()[:_MOST_OPEN]
        readings = chain.from_iterable(combinations(open_ones, count) for count in range(len(open_ones) + 1))
        with self._trying(), WithoutDropout():
            own = [leaf for leaf in sample_call.call({}, sample_call.leaves)[0] if isinstance(leaf, Tensor)]
            for shared in readings:
                sample_call.mapped = {index: dim for index, dim in mapped.items() if index not in shared}
                try:
                    found = pytree.tree_leaves(sample_call.run(rows, commit=False))
                except (Exception, NotFollowed):  # a reading that does not fit fails in whatever way the module fails
                    continue
                finally:
                    self.by_loop = by_loop
                if _agree([leaf for leaf in found if isinstance(leaf, Tensor)], own):
                    self.shared_arguments.update(map(sample_call.key, shared))
                    return
        sample_call.mapped = mapped

    def call(self, *args: Any, **kwargs: Any) -> Any:
        given = self._parameters_given(args, kwargs) if self.derives else None
        if given is not None:
            return self._derive(given, args, kwargs)
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        whole = self.whole_parameters()  # one that was removed, as a bias may be, is not among them
        live = {key: slot for key, slot in self.slots.items() if slot.parameter.requires_grad and key in whole}
        if not live:
            return self.original(*args, **kwargs)
        sample_call = SampleCall(self, args, kwargs)
        sample_call.admit()
        own = self._own_output(sample_call)
        if own is not None and sample_call.open_arguments():
            self._decide(sample_call, whole)
            self.dtypes[sample_call.kind()] = [leaf.dtype for leaf in own]
        batch, anchor = sample_call.batch, self.engine.anchor.tensor
        expanded = {
            parameter_key(key): Expand.apply(anchor, whole[key].detach(), batch, self, slot)  # type: ignore[no-untyped-call]
            for key, slot in live.items()
        }
        # The state of a checkpointed forward that runs again is written by the first.
        versions = {key: whole[key]._version for key in live}
        try:
            output = sample_call.run(expanded, commit=not self.engine.forwards.runs_again())
        except RuntimeError as error:
            for key, version in versions.items():
                if whole[key]._version != version:
                    raise UserError(
                        f"{self.name}.{key} is written in forward, which runs sample by sample here; write into a "
                        "parameter after the optimizer's step instead"
                    ) from error
            raise
        if own is not None:
            self._compare_shapes(output, own, batch)
        # A batched bias is added outside of autocast's sight: the module's own dtype is restored.
        dtypes = iter(self.dtypes.get(sample_call.kind(), ()))
        return pytree.tree_map(
            lambda leaf: leaf.to(next(dtypes, leaf.dtype)) if isinstance(leaf, Tensor) else leaf, output
        )


def _agree(found: list[Tensor], own: list[Tensor]) -> bool:
    """Return whether two ways to compute the same outputs differ by no more than rounding."""
    return len(found) == len(own) and all(
        mine.shape == once.shape
        and torch.allclose(mine.double(), once.double(), *_TOLERANCE.get(once.dtype, _HALF_TOLERANCE), equal_nan=True)
        for mine, once in zip(found, own, strict=True)
    )
