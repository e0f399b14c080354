"""Nsight Compute on a real GPU: a small step as a whole and kernel by kernel. Skipped where ncu may not count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dpscope.instruments.ncu.running import find_ncu, try_counters
from dpscope.runner.measure import measure
from dpscope.runner.spec import RunSpec
from dpscope.vocabulary.phases import BACKWARD, FORWARD, GEMM, OPTIMIZER
from dpscope.workloads.configs import make_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    ncu = find_ncu()
    trouble = "no ncu" if ncu is None else try_counters(ncu)
    if trouble:
        pytest.skip(trouble)
    spec = RunSpec(
        workload=make_config("small", num_layers=2),
        method="standard",
        batch_size=4,
        seq_len=256,
        dtype="bf16",
        warmup=1,
        device="cuda",
        instrument="ncu",
        options={"per_kernel": True},
    )
    folder = tmp_path_factory.mktemp("counted") / "files" / "row"
    return measure(spec, files=folder), folder


def test_the_bytes_of_a_step_were_measured(counted):
    result, _ = counted
    assert result.ncu["source"] == "measured", result.ncu["reason"]
    traffic = result.ncu["traffic"]
    spec = RunSpec.from_dict(result.spec)
    # AdamW alone reads parameters, gradients and two moments: 4 bytes each.
    parameters = 2 * spec.workload.vocab_size * spec.workload.hidden_dim
    assert traffic["dram_read_bytes"] + traffic["dram_write_bytes"] > 4 * 4 * parameters
    assert traffic["l2_to_sm_bytes"] > 0


def test_the_operations_are_those_of_the_products(counted):
    """6 x parameters of the products x tokens, and attention on top."""
    result, _ = counted
    spec = RunSpec.from_dict(result.spec)
    width, tokens = spec.workload.hidden_dim, spec.batch_size * spec.seq_len
    weights = spec.workload.num_layers * 12 * width**2 + width * spec.workload.vocab_size
    products = 6 * weights * tokens
    assert products <= result.ncu["flops"]["tensor"] <= 1.5 * products


def test_kernels_have_families_and_phases(counted):
    result, _ = counted
    kernels = result.ncu["kernels"]
    assert kernels["calls_seen"] == pytest.approx(kernels["calls_total"], rel=0.05)
    assert {row["phase"] for row in kernels["rows"]} >= {FORWARD, BACKWARD, OPTIMIZER}
    assert any(row["family"] == GEMM and row["phase"] == BACKWARD for row in kernels["rows"])


def test_the_report_of_a_step_is_small_and_named(counted):
    result, folder = counted
    assert (folder / "step.ncu-rep").stat().st_size < 2e6
    assert all(Path(path).name in ("step.ncu-rep", "kernels.ncu-rep") for path in result.files.values())
