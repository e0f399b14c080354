"""Methods of other packages, found through the entry-point group; and a sweep that completes whatever they do."""

from __future__ import annotations

import os
import textwrap

import pytest
from click.testing import CliRunner

from dpscope.cli import main
from dpscope.results.store import ResultStore
from dpscope.vocabulary.methods import methods

# Three ways for a method to go wrong, as somebody else's package.
MODULE = """
import os, signal, time
import torch
from dpscope.trainers.base import StandardTrainer

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


@pytest.fixture
def compare(site, tmp_path, tiny_flags, monkeypatch):
    """`dpscope compare` of some methods, each row in a real child."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr("dpscope.vocabulary.methods.methods", methods.__wrapped__)  # as in a new process
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*options):
        rows = ["--batch-size", "2", "--instruments", "time", "--out", tmp_path / "out", *options]
        return CliRunner().invoke(main, ["compare", *tiny_flags, *map(str, rows)])

    return run


def test_a_method_that_hangs_is_ended_and_the_row_says_so(compare):
    """Whenever its time is over, it has not ended: so one second will do."""
    done = compare("--methods", "sleepy", "--timeout", "1")
    assert done.exit_code == 1
    told = " ".join(done.stdout.split())
    assert "timeout: sleepy at batch 2, sequence 8: no result within 1 s: raise --timeout" in told


def test_a_sweep_completes_although_rows_run_out_of_memory_and_die(compare, tmp_path):
    done = compare("--methods", "hungry,dying,standard", "--memory-limit", "1")
    printed = done.stdout

    assert done.exit_code == 1
    assert "Traceback" not in done.stderr
    results, skipped = ResultStore(tmp_path / "out").read_all()
    assert skipped == []
    found = {result.experiment: result for result in results.values()}
    statuses = {name: result.status for name, result in found.items()}
    assert statuses == {
        "standard": "ok",  # the built-in one: a package adds methods, it replaces none
        "hungry": "oom",
        "dying": "failed",
    }
    lines = printed.splitlines()
    for name, status in statuses.items():
        row = next(line for line in lines if line.startswith(f"{name} ") and line.rstrip().endswith(status))
        assert ("—" in row) == (status != "ok")
    told = " ".join(printed.split())
    assert "oom: hungry at batch 2, sequence 8: out of memory on the CPU: try a smaller --batch-size" in told
    assert "failed: dying at batch 2, sequence 8: the process was ended by SIGSEGV" in told
