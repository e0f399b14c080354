"""Which backend serves a call, and what holds where Triton is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dpscope.flash.kernels.triton_runtime import rows_are_aligned, table_on, use_triton, with_aligned_rows

CPU = torch.device("cpu")

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # an import of it fails, as where it is not installed
import torch
from dpscope.flash.kernels.fused_update import fused_adam_, fused_sgd_
from dpscope.flash.kernels.gram_norms import gram_norms_squared
from dpscope.flash.kernels.gram_units import GramUnit
from dpscope.flash.kernels.sample_sums import bias_sums, layer_norm_sums
from dpscope.flash.kernels.scaled_sum import scaled_sums
assert not torch.cuda.is_initialized()
x = torch.ones(2, 3, 4)
assert gram_norms_squared([GramUnit(xs=(x,), gs=(x,))]).tolist() == [144.0, 144.0]
assert scaled_sums([x], [x], torch.ones(2))[0].sum() == 96
assert bias_sums(x).sum() == 24
fused_sgd_([torch.zeros(3)], [torch.zeros(3)], lr=1.0, noise_std=1.0)
try:
    layer_norm_sums(x, x, x[:, :, 0], x[:, :, 0], backend="triton")
except ValueError as problem:
    assert "pip install triton" in str(problem)
else:
    raise AssertionError("expected a ValueError")
"""


@pytest.mark.slow
def test_everything_works_without_triton() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_auto_takes_torch_on_a_cpu() -> None:
    assert not use_triton("auto", CPU, served=True)


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="cuda12"):
        use_triton("cuda12", CPU, served=True)  # type: ignore[arg-type]


def test_tables_start_on_16_byte_boundaries() -> None:
    tables = table_on(CPU, [1], [2, 3, 4], [5])
    assert [table.tolist() for table in tables] == [[1], [2, 3, 4], [5]]
    assert all((table.data_ptr() - tables[0].data_ptr()) % 16 == 0 for table in tables)


def test_alignment_of_rows() -> None:
    buffer = torch.zeros(2, 3, 64, dtype=torch.bfloat16)
    assert rows_are_aligned(buffer, buffer[:, :, 8:24])
    assert not rows_are_aligned(buffer[:, :, 4:20])  # starts off a boundary
    assert not rows_are_aligned(buffer.transpose(1, 2))
    assert not rows_are_aligned(buffer[:1].expand(2, 3, 64))  # all samples at one place
    assert rows_are_aligned(buffer[:, :, 8:21])  # rows may end off a boundary
    assert not rows_are_aligned(torch.zeros(2, 3, 5))  # rows of 20 bytes


@pytest.mark.parametrize("part", ["transposed", "off a boundary", "one sample for all", "odd", "backwards in memory"])
def test_any_rows_can_be_aligned(part):
    buffer = torch.randn(4, 64, 64)
    tensor = {
        "transposed": buffer.transpose(1, 2),
        "off a boundary": buffer.flatten()[1 : 1 + 2 * 3 * 8].view(2, 3, 8),
        "one sample for all": buffer[:1].expand(3, 64, 64),
        "odd": buffer[..., :13].transpose(0, 1),
        "backwards in memory": buffer.permute(2, 1, 0),
    }[part]
    aligned = with_aligned_rows(tensor)
    width = tensor.shape[2]
    assert rows_are_aligned(aligned)
    assert torch.equal(aligned[..., :width], tensor)
    assert not aligned[..., width:].any()
