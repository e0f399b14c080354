"""What torch.compile makes for a sweep is kept in a folder of the sweep's own, empty where seconds are measured."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from dpscope.results.store import ResultStore
from dpscope.runner.sweep import CACHE_FOLDER, Limits, SweepObserver, compile_caches, run_sweep
from dpscope.workloads.configs import workload_at
from tests.compiled_here import inductor_links
from tests.torch_here import takes_compiled

WORKLOAD = """
import torch
from torch import nn
from dpscope import Workload

def small(batch_size):
    return Workload(
        model=lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh()),
        batch=lambda seed, device: torch.ones(batch_size, 6, device=device),
        loss=lambda model, x: model(x).square().mean(1),
    )
"""


def test_the_instruments_of_a_row_share_a_cache_that_is_gone_after_the_sweep(make_spec):
    time = make_spec(compile="default")
    memory = replace(time, instrument="memory")
    others = [replace(time, method="flash"), replace(time, batch_size=3), replace(time, compile="max-autotune")]
    with compile_caches([time, memory, *others]) as environment_of:
        folder = Path(environment_of(time)[CACHE_FOLDER])
        folder.mkdir()
        assert Path(environment_of(time)["TMPDIR"]).is_dir()  # where Inductor keeps C++ headers
        assert environment_of(memory)[CACHE_FOLDER] == str(folder)
        assert len({environment_of(spec)[CACHE_FOLDER] for spec in (time, *others)}) == 4
        assert environment_of(make_spec()) == {}
    assert not folder.parent.parent.exists()


def test_a_sweep_that_compiles_nothing_has_none(make_spec):
    with compile_caches([make_spec()]) as environment_of:
        assert environment_of(make_spec()) == {}


@pytest.mark.slow
@takes_compiled
@inductor_links
def test_a_row_of_inductor_s_leaves_nothing_behind(make_spec, tmp_path, monkeypatch):
    """In a process of its own, with a real compiler."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for costly in ("CPP_CACHE_PRECOMPILE_HEADERS", "VEC_ISA_OK"):  # they take longer than all else here
        monkeypatch.setenv(f"TORCHINDUCTOR_{costly}", "0")
    store = ResultStore(tmp_path / "out")
    store.create()
    (tmp_path / "workload.py").write_text(WORKLOAD)
    workload = workload_at(f"{tmp_path}/workload.py:small")
    spec = make_spec(workload=workload, seq_len=None, method="flash", compile="default", steps=3)
    (result,) = run_sweep([spec], store, resume=False, limits=Limits(), observer=SweepObserver())
    assert result.ok, result.reason
    found = result.timing["compilation"]
    assert (found["graphs"], found["graph_breaks"], found["recompiles"]) == (1, 0, 0)
    assert found["seconds"] > 10 * result.timing["median_ms"] / 1e3
    assert list(temporary.iterdir()) == []
