"""Methods of other packages, found through the entry-point group; and a sweep that completes whatever they do."""

from __future__ import annotations

import textwrap

import pytest

from dpscope.results.store import ResultStore

# Three ways for a method to go wrong, as somebody else's package.
MODULE = """
import os, signal, time
import torch
from dpscope.trainers.standard import StandardTrainer

class HungryTrainer(StandardTrainer):
    def train_step(self, batch):
        hoard = []
        while True:
            hoard.append(torch.ones(2**22))

class SleepyTrainer(StandardTrainer):
    def train_step(self, batch):
        while True:
            time.sleep(60)

class DyingTrainer(StandardTrainer):
    def train_step(self, batch):
        os.kill(os.getpid(), signal.SIGSEGV)
"""

ENTRY_POINTS = """
[dpscope.methods]
hungry = misbehaving:HungryTrainer
sleepy = misbehaving:SleepyTrainer
dying = misbehaving:DyingTrainer
standard = misbehaving:DyingTrainer
"""


@pytest.fixture
def site(tmp_path):
    """A folder with the package as pip would install it: the module and its metadata."""
    site = tmp_path / "site"
    metadata = site / "misbehaving-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "misbehaving.py").write_text(MODULE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: misbehaving\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(textwrap.dedent(ENTRY_POINTS))
    return site


def test_a_sweep_completes_although_rows_run_out_of_memory_hang_and_die(start, site, tmp_path, tiny_flags):
    process = start(
        *("-m", "dpscope", "compare", *tiny_flags, "--batch-size", "2", "--out", tmp_path / "out"),
        *("--methods", "hungry,sleepy,dying,standard", "--instruments", "time"),
        # The time limit has to let the other rows import torch on a busy machine.
        *("--memory-limit", "1", "--timeout", "20"),
        env={"PYTHONPATH": str(site)},
    )
    printed, complaints = process.communicate(timeout=240)

    assert process.returncode == 1
    assert "Traceback" not in complaints
    results, skipped = ResultStore(tmp_path / "out").read_all()
    assert skipped == []
    found = {result.experiment: result for result in results.values()}
    statuses = {name: result.status for name, result in found.items()}
    assert statuses == {
        "standard": "ok",  # the built-in one: a package adds methods, it replaces none
        "hungry": "oom",
        "sleepy": "timeout",
        "dying": "failed",
    }
    lines = printed.splitlines()
    for name, status in statuses.items():
        row = next(line for line in lines if line.startswith(f"{name} ") and line.rstrip().endswith(status))
        assert ("—" in row) == (status != "ok")
    told = " ".join(printed.split())
    assert "oom: hungry at batch 2, sequence 8: out of memory on the CPU: try a smaller --batch-size" in told
    assert "timeout: sleepy at batch 2, sequence 8: no result within 20 s: raise --timeout" in told
    assert "failed: dying at batch 2, sequence 8: the process was ended by SIGSEGV" in told
