"""Reduction of clipped sums over ranks: Σ over ranks of Σ_b c_b v_b, in float32, one block of the model at a time.

Sharded parameters (FSDP2): one reduce-scatter a block (several if the block is large), after which each rank has its
shard; with replicas (HSDP) the shards are then added up over them. Whole parameters (DDP): all-reduce, in buckets. All
ranks go through the same buckets in the same order, whatever their own batch was. A bucket is reduced while the sums of
the next are computed, so at most two buckets of the gradient are unsharded at a time, besides one piece.

Sums are made in pieces that do not follow the blocks: weights of equal shapes share a launch there, as without ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpscope.flash.gradients.contributions import wide
from dpscope.flash.ranks.agreement import naming_lost_ranks
from dpscope.flash.ranks.layout import Layout, blocks
from dpscope.flash.torch_side.shards import ShardCut, cut_of, is_sharded, local, shard_dim

_DOING = "adding up clipped sums"
# Bytes of sums that are made at once, of sharded parameters and of whole ones, whose buckets are small.
AT_ONCE_BYTES = {True: 2**29, False: 2**28}
# A bucket of whole parameters is as large as those of torch's DistributedDataParallel. A sharded block travels in one,
# but an embedding and a head, which both belong to the root, are each as large as several blocks.
BUCKET_BYTES = {True: 2**30, False: 25 * 2**20}

# Its name since torch 2.13, and before.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SumsOf = Callable[[Sequence[nn.Parameter]], Mapping[nn.Parameter, Tensor]]


class Bucket(NamedTuple):
    """Parameters whose sums travel together; all of them are sharded, or none is."""

    parameters: list[nn.Parameter]
    dtype: torch.dtype
    sharded: bool


class Reduction:
    """Reduction of the clipped sums of a model that is spread as `layout` says."""

    def __init__(self, layout: Layout) -> None:
        self.owners = dict(blocks(layout.module))  # modules given to fully_shard
        self._groups: list[Any] = []
        if layout.mesh is not None:
            self._groups = [layout.mesh.get_group(dim) for dim in range(layout.mesh.ndim)]
        self._world = getattr(layout.wrapper, "process_group", None)  # None: the default group

    def buckets(self, parameters: Collection[nn.Parameter]) -> list[Bucket]:
        """Group the parameters into buckets, in the order of travel: last blocks first, as backward reaches them."""
        found: list[Bucket] = []
        open_for: dict[object, tuple[Bucket, int]] = {}
        for parameter in reversed(list(parameters)):
            dtype, sharded = wide(parameter.dtype), is_sharded(parameter)
            key = (dtype, sharded, id(self.owners[parameter]) if sharded else None)
            bucket, held = open_for.get(key, (None, 0))
            full = held + _bytes(parameter) if sharded else held  # a bucket of whole ones is closed when it is full
            if bucket is None or (held and full >= BUCKET_BYTES[sharded]):
                bucket, held = Bucket([], dtype, sharded), 0
                found.append(bucket)
            bucket.parameters.append(parameter)
            open_for[key] = (bucket, held + _bytes(parameter))
        return found

    def reduce(
        self, parameters: Collection[nn.Parameter], sums_of: SumsOf
    ) -> Iterator[tuple[list[nn.Parameter], list[Tensor]]]:
        """Yield parameters, each once, with this rank's parts of their sums over all ranks, a bucket at a time."""
        travelling: deque[_Travelling] = deque()
        buckets = self.buckets(parameters)
        sums = _Pieces([parameter for bucket in buckets for parameter in bucket.parameters], sums_of)
        for bucket in buckets:
            send = self._scatter if bucket.sharded else self._all_reduce
            travelling.append(send(bucket, sums))
            if len(travelling) > 1:
                yield self._arrive(travelling.popleft())
        while travelling:
            yield self._arrive(travelling.popleft())

    def _scatter(self, bucket: Bucket, sums: _Pieces) -> _Travelling:
        cuts = [cut_of(parameter) for parameter in bucket.parameters]
        ranks, width = cuts[0].ranks, sum(cut.span for cut in cuts)
        device = local(bucket.parameters[0]).device
        outgoing = torch.empty(ranks, width, dtype=bucket.dtype, device=device)  # row r goes to rank r
        at = 0
        for parameter, cut in zip(bucket.parameters, cuts, strict=True):
            _lay_out(outgoing[:, at : at + cut.span], sums.take(parameter), cut)
            at += cut.span
        group = self._groups[shard_dim(bucket.parameters[0])]
        if ranks == 1:
            return _Travelling(bucket, outgoing[0], None, None)
        incoming = torch.empty(width, dtype=bucket.dtype, device=device)
        with naming_lost_ranks(_DOING):
            work = _reduce_scatter(incoming, outgoing.view(-1), op=dist.ReduceOp.SUM, group=group, async_op=True)
        return _Travelling(bucket, incoming, work, outgoing)

    def _all_reduce(self, bucket: Bucket, sums: _Pieces) -> _Travelling:
        parts = [
            parameter.new_zeros(parameter.numel(), dtype=bucket.dtype)
            if (total := sums.take(parameter)) is None
            else total.reshape(-1).to(bucket.dtype)
            for parameter in bucket.parameters
        ]
        whole = torch.cat(parts)
        with naming_lost_ranks(_DOING):
            work = dist.all_reduce(whole, op=dist.ReduceOp.SUM, group=self._world, async_op=True)
        return _Travelling(bucket, whole, work, None)

    def _arrive(self, travelling: _Travelling) -> tuple[list[nn.Parameter], list[Tensor]]:
        bucket, arrived, work, _ = travelling
        with naming_lost_ranks(_DOING):
            if work is not None:
                work.wait()
            if bucket.sharded and len(self._groups) > 1:
                dist.all_reduce(arrived, op=dist.ReduceOp.SUM, group=self._groups[0])
        parts: list[Tensor] = []
        at = 0
        for parameter in bucket.parameters:
            part = local(parameter)
            parts.append(arrived[at : at + part.numel()].view(part.shape))
            at += cut_of(parameter).span if bucket.sharded else part.numel()
        return bucket.parameters, parts


class _Pieces:
    """Sums of the parameters in the order of travel, made about `AT_ONCE_BYTES` at a time when the first is taken."""

    def __init__(self, parameters: Sequence[nn.Parameter], sums_of: SumsOf) -> None:
        self._left, self._sums_of = deque(parameters), sums_of
        self._made: dict[nn.Parameter, Tensor] = {}
        self._piece: set[nn.Parameter] = set()

    def take(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the sum of the next parameter; None if no backward pass of this rank has reached it."""
        if parameter not in self._piece:
            piece, most = [self._left.popleft()], AT_ONCE_BYTES[is_sharded(parameter)]
            held = _bytes(piece[0])
            while self._left and (held := held + _bytes(self._left[0])) <= most:
                piece.append(self._left.popleft())
            self._piece, self._made = set(piece), dict(self._sums_of(piece))
        return self._made.pop(parameter, None)


def _bytes(parameter: nn.Parameter) -> int:
    """Return the bytes of a parameter's whole sum."""
    return parameter.numel() * wide(parameter.dtype).itemsize


class _Travelling(NamedTuple):
    bucket: Bucket
    arrived: Tensor
    work: Any
    outgoing: Tensor | None  # held until it has arrived


def _lay_out(rows: Tensor, total: Tensor | None, cut: ShardCut) -> None:
    """Cut `total` into rows (ranks, span), one for each rank, padded with zeros."""
    if total is None:
        rows.zero_()
        return
    flat = total.reshape(-1)
    full = flat.numel() // cut.span if cut.span else 0
    rows[:full].copy_(flat[: full * cut.span].view(full, cut.span))
    if full < cut.ranks and cut.span:
        rows[full:].zero_()
        rest = flat[full * cut.span :]
        rows[full, : rest.numel()].copy_(rest)
