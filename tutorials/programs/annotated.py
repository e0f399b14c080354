"""A training loop annotated in every way: decorator, context, push and pop, start and end, and autograd's operators.

Under Nsight Systems each shows up in the lane NVTX. Without it, and on a CPU, ranges cost next to nothing.
"""

from __future__ import annotations

import argparse

import torch
from practice import captured, device_here
from torch import Tensor, nn

from dpscope.instruments.nvtx import nvtx_available, nvtx_range


@nvtx_range("augment")  # a decorator: every call is a range
def augment(batch: Tensor) -> Tensor:
    return batch + 0.01 * torch.randn_like(batch)


def train(device: str, steps: int) -> float:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, labels = torch.randn(512, 256, device=device), torch.randint(10, (512,), device=device)
    loss = torch.zeros((), device=device)
    for _ in range(steps):
        with nvtx_range("step"):  # a context: the range ends with the block
            batch = augment(batch)
            with nvtx_range("forward"):
                loss = nn.functional.cross_entropy(model(batch), labels)
            if nvtx_available():
                torch.cuda.nvtx.range_push("backward")  # push and pop: nested, on one thread
            loss.backward()
            if nvtx_available():
                torch.cuda.nvtx.range_pop()
                update = torch.cuda.nvtx.range_start("update")  # start and end: may overlap, and end on another thread
            optimizer.step()
            optimizer.zero_grad()
            if nvtx_available():
                torch.cuda.nvtx.range_end(update)
                torch.cuda.nvtx.mark("step done")  # a moment
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=device_here(), choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--autograd", action="store_true", help="a range for every operator, forward and backward")
    asked = parser.parse_args()
    train(asked.device, 5)  # warm up
    with captured(asked.device), torch.autograd.profiler.emit_nvtx(enabled=asked.autograd and nvtx_available()):
        print(f"loss {train(asked.device, asked.steps):.3f}")
