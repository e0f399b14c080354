"""A pipeline that copies each batch from ordinary host memory before it computes with it.

Ordinary (pageable) memory may be moved by the operating system, so the driver copies it in pieces through a buffer
of its own, and the call returns only when that is done: copy and computation take turns. Finding: Host-to-Device
copies from pageable memory, at a fraction of the link's bandwidth, with nothing beside them. From pinned memory the
copy is faster and needs no host; on a stream of its own it runs while the batch before it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch
from practice import Program, Step, run
from torch import Tensor

WIDTH = 1024
PRODUCTS = 3


def batches(size: int, *, pinned: bool) -> Iterator[Tensor]:
    """The same four batches again and again, (size, WIDTH) each, in host memory."""
    made = [torch.randn(size, WIDTH) for _ in range(4)]
    return cycle([batch.pin_memory() for batch in made] if pinned else made)


def model(device: str) -> Tensor:
    return torch.randn(WIDTH, WIDTH, device=device) / WIDTH**0.5


def compute(batch: Tensor, weight: Tensor) -> Tensor:
    for _ in range(PRODUCTS):
        batch = batch @ weight
    return batch


def unpinned(device: str, size: int) -> Step:
    loader, weight = batches(size, pinned=False), model(device)
    # On a CPU there is no other memory to copy to: a copy within it stands in.
    return lambda: compute(next(loader).to(device, copy=True), weight)


def pinned(device: str, size: int) -> Step:
    loader, weight = batches(size, pinned=True), model(device)
    return lambda: compute(next(loader).to(device, non_blocking=True), weight)


def prefetched(device: str, size: int) -> Step:
    loader, weight = batches(size, pinned=True), model(device)
    copies = torch.cuda.Stream()

    def fetch() -> Tensor:
        with torch.cuda.stream(copies):
            return next(loader).to(device, non_blocking=True)

    waiting = [fetch()]

    def step() -> Tensor:
        torch.cuda.current_stream().wait_stream(copies)  # this batch has to be there
        batch = waiting.pop()
        batch.record_stream(torch.cuda.current_stream())  # its memory is in use here too
        waiting.append(fetch())  # the next one travels while this one is computed
        return compute(batch, weight)

    return step


PROGRAM = Program(
    name="unpinned_copy",
    finding="Copies from pageable memory run at a fraction of the link, with nothing beside them.",
    ways={"unpinned": unpinned, "pinned": pinned, "prefetched": prefetched},
    sizes={"cuda": 16384, "cpu": 256},
    needs_cuda=("pinned", "prefetched"),
    work=lambda way, size: {"copied_bytes": 4 * size * WIDTH, "flops": PRODUCTS * 2 * size * WIDTH**2},
)

if __name__ == "__main__":
    run(PROGRAM)
