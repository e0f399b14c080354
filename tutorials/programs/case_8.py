"""Case 8: one layer of a recommender that scores a batch against a table of items."""

from __future__ import annotations

import torch
from practice import Program, Step, run
from torch import Tensor

ITEMS = {"cuda": 2**20, "cpu": 2**13}
WIDTH = 128


def table_and_users(device: str, size: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(WIDTH, ITEMS[device], device=device), torch.randn(size, WIDTH, device=device)


def first(device: str, size: int) -> Step:
    table, users = table_and_users(device, size)

    def step() -> Tensor:
        rows = table.t().contiguous()  # (ITEMS, WIDTH)
        return torch.nn.functional.linear(users, rows)

    return step


def second(device: str, size: int) -> Step:
    table, users = table_and_users(device, size)
    rows = table.t().contiguous()
    return lambda: torch.nn.functional.linear(users, rows)


PROGRAM = Program(
    name="case_8",
    task="scores of a batch of users against a table of items",
    ways={"a": first, "b": second},
    sizes={"cuda": 64, "cpu": 4},
)

if __name__ == "__main__":
    run(PROGRAM)
