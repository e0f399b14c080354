"""What travels between ranks, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from dpscope.flash.ranks import reduction
from dpscope.flash.ranks.layout import Layout
from dpscope.flash.ranks.reduction import BUCKET_BYTES, Reduction, _lay_out
from dpscope.flash.torch_side.shards import ShardCut
from tests.torch_here import takes_shards


@takes_shards
@pytest.mark.slow
def test_private_training_communicates_what_ordinary_training_does(worlds: dict[int, Any]) -> None:
    """Ordinary FSDP2 training reduces in float32, too; keys and counts of a step are some bytes more."""
    for found in worlds[2]:
        ordinary, private = found["communicated"]
        assert private["reduce-scatter"] == ordinary["reduce-scatter"]
        assert sum(private.values()) <= 1.01 * sum(ordinary.values())


def test_whole_parameters_travel_in_buckets_last_ones_first() -> None:
    side = int((BUCKET_BYTES[False] / 4) ** 0.5) + 1
    model = nn.Sequential(*(nn.Linear(side, side, bias=False, device="meta") for _ in range(3)), nn.Linear(2, 2))
    buckets = Reduction(Layout(None, model, None)).buckets(list(model.parameters()))
    names = {id(p): name for name, p in model.named_parameters()}
    assert [[names[id(p)] for p in bucket.parameters] for bucket in buckets] == [
        ["3.bias", "3.weight", "2.weight"],
        ["1.weight"],
        ["0.weight"],
    ]


def test_large_parameters_of_a_sharded_block_travel_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedding and head belong to the root: together they would take three times the memory of the larger one."""
    monkeypatch.setattr(reduction, "is_sharded", lambda parameter: True)
    monkeypatch.setitem(reduction.BUCKET_BYTES, True, 400)
    model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 50))
    buckets = Reduction(Layout(None, model, None)).buckets(list(model.parameters()))
    names = {id(p): name for name, p in model.named_parameters()}
    assert [[names[id(p)] for p in bucket.parameters] for bucket in buckets] == [
        ["3.bias"],
        ["3.weight"],
        ["2.bias", "2.weight", "1.bias", "1.weight"],
        ["0.weight"],
    ]


def test_sums_of_several_buckets_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch makes the sums of equal layers, whatever buckets they travel in; a piece holds few of them."""
    monkeypatch.setitem(reduction.BUCKET_BYTES, False, 1)
    monkeypatch.setitem(reduction.AT_ONCE_BYTES, False, 4 * 4 * 4 * 3)
    monkeypatch.setattr(reduction.dist, "all_reduce", lambda *args, **kwargs: None)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(7)))
    asked = []

    def sums_of(parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        asked.append(len(parameters))
        return {parameter: 2 * parameter.detach() for parameter in parameters if parameter is not model[3].weight}

    found = list(Reduction(Layout(None, model, None)).reduce(list(model.parameters()), sums_of))
    assert asked == [3, 3, 1]
    assert [parameters for parameters, _ in found] == [[layer.weight] for layer in reversed(model)]
    for (parameter,), (total,) in found:
        assert torch.equal(total, 0 * parameter if parameter is model[3].weight else 2 * parameter)


@pytest.mark.parametrize("total", [0, 1, 5, 8])
def test_rows_of_a_parameter_are_cut_as_fsdp_cuts_them(total: int) -> None:
    """⌈total / 4⌉ rows each, the last ranks fewer or none, padded with zeros."""
    whole = torch.arange(1, total * 3 + 1, dtype=torch.float32).view(total, 3)
    cuts = [ShardCut(4, rank, -(-total // 4), 3, total) for rank in range(4)]
    rows = torch.full((4, cuts[0].span), float("nan"))
    _lay_out(rows, whole, cuts[0])
    for rank, (cut, chunk) in enumerate(zip(cuts, [*whole.chunk(4), *[whole[:0]] * 4][:4], strict=False)):
        assert torch.equal(rows[rank, : cut.held], chunk.flatten())
        assert not rows[rank, cut.held :].any()
        assert cut.first == (int(chunk.flatten()[0]) - 1 if chunk.numel() else whole.numel())
