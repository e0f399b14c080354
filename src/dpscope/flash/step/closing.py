"""The clipped sums of a micro-batch that is closed, as they are iterated over: of this process, or over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from dpscope.flash.ranks.ranks import Ranks
from dpscope.flash.step.microbatch import MicroBatch, RunningSum, SumBatch
from dpscope.flash.torch_side.autocast import no_autocast

Parameters = Mapping[nn.Parameter, object]  # all of the model, in order


def local_sums(
    micro: MicroBatch,
    of_blocks: SumBatch,
    parameters: Parameters,
    device: str,
    into: RunningSum | None,
    *,
    factored: bool,
) -> Iterator[SumBatch]:
    """Yield the sum of every trainable parameter once. `of_blocks`: sums made earlier, when blocks were recomputed."""
    done = {id(parameter) for parameter in (*micro.parameters, *of_blocks.parameters)}
    if of_blocks.parameters:
        yield of_blocks
    del of_blocks
    batches = micro.sums(into=into, factored=factored)
    del micro
    while True:
        with no_autocast(device):  # for each batch of sums: the caller's code in between keeps its own mode
            batch = next(batches, None)
        if batch is None:
            break
        yield batch
        del batch
    yield from zero_sums(parameters, done, into)


def zero_sums(parameters: Parameters, done: set[int], into: RunningSum | None) -> Iterator[SumBatch]:
    """Yield zero sums of the trainable parameters that no backward pass reached."""
    for parameter in parameters:
        if id(parameter) not in done and parameter.requires_grad:
            existing = into(parameter) if into else None
            yield SumBatch([parameter], [torch.zeros_like(parameter) if existing is None else existing], None)


def reduced_sums(
    ranks: Ranks,
    micro: MicroBatch | None,
    of_blocks: SumBatch,
    parameters: Parameters,
    device: str,
    into: RunningSum | None,
) -> Iterator[SumBatch]:
    """Yield the sums over all ranks. Each rank gets its own part of each parameter."""
    held = dict(zip(of_blocks.parameters, of_blocks.tensors, strict=True))
    del of_blocks

    def sums_of(some: Sequence[nn.Parameter]) -> Mapping[nn.Parameter, Tensor]:
        again = {parameter: held.pop(parameter) for parameter in some if parameter in held}
        with torch.no_grad(), no_autocast(device):
            return again if micro is None else {**again, **micro.sums_of(some)}

    ranks.meet_to_reduce()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for reduced, sums in ranks.reduction.reduce(trained, sums_of):
        before = [into(parameter) if into else None for parameter in reduced]
        added = [new if old is None else old.add_(new) for old, new in zip(before, sums, strict=True)]
        yield SumBatch(reduced, added, None)


def one_by_one(batches: Iterator[SumBatch]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield (parameter, sum) pairs. Each is released when the next one is requested."""
    for parameters, sums, _ in batches:
        parameters.reverse()
        sums.reverse()
        while sums:
            yield parameters.pop(), sums.pop()
