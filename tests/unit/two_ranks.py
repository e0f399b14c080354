"""A module run as two ranks under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys

from tests import ROOT


def run_ranks(module: str, *arguments: object) -> None:
    """Run `python -m module` as two ranks on this CPU; fail with what they wrote if one does."""
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", module]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    run = subprocess.run(
        [*ranks, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
