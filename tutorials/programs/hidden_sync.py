"""A hidden synchronisation: a training loop that writes down every parameter's gradient norm with `float(...)`.

`float(tensor)`, `.item()`, `.cpu()`, `print(tensor)` and `if tensor:` need the number now, so the host waits until
the GPU has caught up, and the GPU then waits for the host to launch again. Finding: a `cudaStreamSynchronize` for
every norm, by `aten::item`, and an idle gap after each. Norms that stay on the GPU and are read once a hundred steps
cost nothing.
"""

from __future__ import annotations

import torch
from practice import Program, Step, run
from torch import nn

WIDTH = {"cuda": 1024, "cpu": 128}
LAYERS = 16
LOGGED_EVERY = 100  # steps


def training(device: str, size: int) -> tuple[nn.Sequential, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    width = WIDTH[device]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS))).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(size, width, device=device)


def norms_read_at_once(device: str, size: int) -> Step:
    model, optimizer, batch = training(device, size)
    log: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        log.extend(float(p.grad.norm()) for p in model.parameters())  # waits, once a parameter
        optimizer.step()

    return step


def norms_kept_on_device(device: str, size: int) -> Step:
    model, optimizer, batch = training(device, size)
    kept: list[torch.Tensor] = []
    log: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        kept.extend(torch._foreach_norm([p.grad for p in model.parameters()]))
        optimizer.step()
        if len(kept) >= LOGGED_EVERY * 2 * LAYERS:
            log.extend(torch.stack(kept).tolist())  # waits, once in a hundred steps
            kept.clear()

    return step


PROGRAM = Program(
    name="hidden_sync",
    finding="The host waits for the GPU once a parameter (aten::item), and the GPU for the host after each.",
    ways={"norms_read_at_once": norms_read_at_once, "norms_kept_on_device": norms_kept_on_device},
    sizes={"cuda": 512, "cpu": 4},
)

if __name__ == "__main__":
    run(PROGRAM)
