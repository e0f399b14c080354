"""What a trainer asks of torch.compile, in the words of every version of torch that dpscope works with."""

from __future__ import annotations

import torch

from dpscope.trainers.modes import CACHE_SIZE_LIMITS, RECOMPILE_LIMITS, CompileCounts, any_number_of_graphs


def test_limits_of_graphs_are_raised_under_whatever_name_they_have():
    config = torch._dynamo.config
    names = RECOMPILE_LIMITS if hasattr(config, RECOMPILE_LIMITS[0]) else CACHE_SIZE_LIMITS
    before = [getattr(config, name) for name in names]
    with any_number_of_graphs():
        assert all(getattr(config, name) == 10**5 for name in names)
    assert [getattr(config, name) for name in names] == before


def test_a_model_of_more_shapes_than_torch_s_limit_is_compiled_for_each():
    torch._dynamo.reset()
    layer = torch.compile(torch.nn.Linear(3, 2), backend="aot_eager", dynamic=False)
    before = CompileCounts.now().graphs
    with any_number_of_graphs():
        for samples in range(2, 14):
            layer(torch.ones(samples, 3))
    assert CompileCounts.now().graphs - before == 12
