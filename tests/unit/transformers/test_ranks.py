"""Two ranks under torchrun take the steps of one process, noise included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.unit.transformers.rank_worker import main
from tests.unit.transformers.small_training import assert_same

WORKER = Path(__file__).with_name("rank_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_take_the_steps_of_one_process(tmp_path, parallel):
    main(str(tmp_path), "none")
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*ranks, str(WORKER), str(tmp_path), parallel],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
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
