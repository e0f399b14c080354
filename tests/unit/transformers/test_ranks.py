"""Two ranks take the steps of one process, noise included."""

from __future__ import annotations

import pytest
import torch

from tests.torch_here import takes_shards
from tests.unit.transformers.rank_worker import main
from tests.unit.transformers.small_training import assert_same
from tests.unit.two_ranks import fork_ranks


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=takes_shards)])
def test_two_ranks_take_the_steps_of_one_process(tmp_path, clean_copy, parallel):
    main(str(tmp_path), "none")
    clean_copy(fork_ranks, main, tmp_path, parallel)
    one, two = (torch.load(tmp_path / f"{name}.pt") for name in ("none", parallel))
    assert two["sharded"] == (parallel == "fsdp")
    assert two["history"] == one["history"]
    assert_same(two["weights"], one["weights"])
    assert two["losses"] == pytest.approx(one["losses"], rel=0.01)  # a mean of the ranks' means
    if parallel == "fsdp":
        assert list(two["resumed"]) == ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
        for resumed, epsilon in two["resumed"].values():
            assert_same(resumed, two["weights"], tolerance=0)
            assert epsilon == two["epsilon"]
