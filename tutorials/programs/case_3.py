"""Case 3: bring each batch from host memory to the device and compute with it, in three ways."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch
from practice import Program, Step, run
from torch import Tensor

WIDTH = 1024
PRODUCTS = 3


def batches(size: int, *, pinned: bool) -> Iterator[Tensor]:
    """Yield the same four batches again and again, (size, WIDTH) each, in host memory."""
    made = [torch.randn(size, WIDTH) for _ in range(4)]
    return cycle([batch.pin_memory() for batch in made] if pinned else made)


def model(device: str) -> Tensor:
    return torch.randn(WIDTH, WIDTH, device=device) / WIDTH**0.5


def compute(batch: Tensor, weight: Tensor) -> Tensor:
    for _ in range(PRODUCTS):
        batch = batch @ weight
    return batch


def first(device: str, size: int) -> Step:
    loader, weight = batches(size, pinned=False), model(device)
    # On a CPU there is no other memory to copy to: a copy within it takes its place.
    return lambda: compute(next(loader).to(device, copy=True), weight)


def second(device: str, size: int) -> Step:
    loader, weight = batches(size, pinned=True), model(device)
    return lambda: compute(next(loader).to(device, non_blocking=True), weight)


def third(device: str, size: int) -> Step:
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
    name="case_3",
    task="bring each batch to the device and multiply it three times",
    ways={"a": first, "b": second, "c": third},
    sizes={"cuda": 16384, "cpu": 256},
    needs_cuda=("b", "c"),
    work=lambda way, size: {"copied_bytes": 4 * size * WIDTH, "flops": PRODUCTS * 2 * size * WIDTH**2},
)

if __name__ == "__main__":
    run(PROGRAM)
