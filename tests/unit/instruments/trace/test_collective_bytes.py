"""Bytes of collectives, by the names that people know."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dpscope.instruments.trace.attribution import CollectiveBytes


@pytest.fixture(autouse=True)
def two_processes() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_each_collective_counts_the_bytes_of_its_larger_side() -> None:
    with CollectiveBytes() as seen:
        dist.all_reduce(torch.zeros(10))
        dist.all_reduce(torch.zeros(5, dtype=torch.bfloat16))
        dist.all_gather([torch.zeros(4), torch.zeros(4)], torch.zeros(4))
        torch.zeros(1000).sum()
    assert seen.bytes == {"all-reduce": 50, "all-gather": 32}
    # Of two ranks, each sends half of what is gathered; of an all-reduce a half twice.
    assert seen.collectives["all-reduce"] == {"calls": 2, "bytes": 50, "sent_bytes": 50}
    assert seen.collectives["all-gather"] == {"calls": 1, "bytes": 32, "sent_bytes": 16}
    assert seen.dtypes["all-reduce"] == {torch.float32, torch.bfloat16}
