"""A launch-bound loop: an optimizer written by hand, one tiny operator for each of `size` small parameters.

Each operator costs the host some microseconds, whatever it computes, and the GPU finishes it sooner than the next
one comes. Finding: the GPU is idle most of the time, waiting for the host. One call for all parameters mends it
(`torch._foreach_add_`, which is what torch's own optimizers do); so does recording the loop once and replaying it as
a CUDA graph.
"""

from __future__ import annotations

import torch
from practice import Program, Step, run
from torch import Tensor

NUMBERS = 256  # in a parameter
RATE = 1e-3


def parameters(device: str, size: int) -> tuple[list[Tensor], list[Tensor]]:
    made = [[torch.randn(NUMBERS, device=device) for _ in range(size)] for _ in range(2)]
    return made[0], made[1]


def loop(device: str, size: int) -> Step:
    weights, gradients = parameters(device, size)

    def step() -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.add_(gradient, alpha=-RATE)

    return step


def foreach(device: str, size: int) -> Step:
    weights, gradients = parameters(device, size)
    return lambda: torch._foreach_add_(weights, gradients, alpha=-RATE)


def graph(device: str, size: int) -> Step:
    step = loop(device, size)
    step()
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        step()
    return recorded.replay


PROGRAM = Program(
    name="launch_bound",
    finding="The GPU is idle most of the time and waits for the host: fewer launches make it faster.",
    ways={"loop": loop, "foreach": foreach, "graph": graph},
    sizes={"cuda": 400, "cpu": 400},
    needs_cuda=("graph",),
    work=lambda way, size: {"bytes": 3 * 4 * NUMBERS * size, "flops": 2 * NUMBERS * size},
)

if __name__ == "__main__":
    run(PROGRAM)
