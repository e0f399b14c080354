"""Kernels compiled for GPUs that are not here: what a program takes of their shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from dpscope.flash.kernels import conv_kernels, conv_products, gram_kernels, gram_units, scaled_sum, triton_runtime
from dpscope.flash.kernels.conv_products import FOR_NORMS, FOR_SUM, Geometry
from dpscope.flash.kernels.triton_runtime import has_triton, stages_that_fit

pytestmark = pytest.mark.skipif(not has_triton(3, 6), reason="Triton compiles for other GPUs in another way")

CUDA = torch.device("cuda", 0)
TYPES = dict.fromkeys(("x", "g", "values", "directions", "totals", "scale", "partials"), "*fp32")
TYPES |= dict.fromkeys(("table", "tile_table", "unit_table", "segments"), "*i64") | {
    "parts": "*fp64",
    "min_scale": "fp32",
}
SHARED = {80: 163, 86: 99, 90: 227, 120: 99}  # KiB that a program may take


def compiled(kernel: Any, version: int, constants: Mapping[str, Any], **types: str) -> Any:
    """Compile a kernel whose arguments are 32-bit integers, but for `TYPES` and `types`. All are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = {name: value for name, value in constants.items() if name in kernel.arg_names}
    others = {name: (TYPES | types).get(name, "i32") for name in kernel.arg_names if name not in known}
    places = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        others | dict.fromkeys(known, "constexpr"),
        {places[name]: value for name, value in known.items()},
        {places[name]: [["tt.divisibility", 16]] for name, kind in others.items() if kind != "fp32"},
    )
    options = {name: value for name, value in constants.items() if name not in known}
    return triton.compile(source, target=GPUTarget("cuda", version, 32), options=options)


@pytest.fixture(params=[80, 86, 120])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(triton_runtime, "capability", lambda index: divmod(request.param, 10))
    found: int = request.param
    return found


@pytest.mark.slow
@pytest.mark.parametrize("operands", [{}, {"x": "*i64", "g": "*i64"}], ids=["one", "tables of several"])
@pytest.mark.parametrize("work", [FOR_NORMS, FOR_SUM])
def test_convolutions_fit(version: int, work: str, operands: dict[str, str]) -> None:
    at = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)
    sizes = (64, 256, 14, 14), (64, 256, 14, 14)
    plan = conv_products._plan.__wrapped__(*sizes, at, torch.float32, True, work, None, CUDA)
    kernel = conv_kernels._conv_sum_kernel if work == FOR_SUM else conv_kernels._conv_products_kernel
    found = compiled(kernel, version, plan.constants, **operands)
    assert found.metadata.shared <= SHARED[version] * 1024


@pytest.mark.slow
@pytest.mark.parametrize("length", [197, 1024])
def test_clipped_sums_fit(version: int, length: int) -> None:
    import triton.language as tl

    tiles = scaled_sum.default_tiles(length, 768, CUDA)
    step = (tiles.block_m + tiles.block_n) * tiles.block_k * 2
    constants = {"DTYPE": tl.bfloat16, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k}
    constants |= {"GROUP_M": 8, "MAX_SAMPLES": 64, "ACCUMULATE": False, "TMA": tiles.tma, "num_warps": tiles.num_warps}
    constants["num_stages"] = stages_that_fit(tiles.num_stages, step, CUDA)
    found = compiled(scaled_sum._scaled_sum_kernel, version, constants)
    assert found.metadata.shared <= SHARED[version] * 1024
    assert tiles.tma == (version >= 90)
    assert ".local" not in found.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gram_norms_fit(version: int, dtype: torch.dtype) -> None:
    kind = gram_units.UnitKind(1024, dtype, dtype, True, True, True, True, dtype == torch.float32)
    tiles = gram_units.choose_tiles(kind, CUDA)
    of = triton_runtime.TRITON_DTYPES[dtype]
    constants = {"X_DTYPE": of, "G_DTYPE": of, "BLOCK_T": tiles.block_t, "BLOCK_S": tiles.block_s}
    constants |= {"BLOCK_K": tiles.block_k, "TMA": tiles.tma, "ALIGNED": True, "PRECISION": "tf32"}
    constants |= {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    found = compiled(gram_kernels._gram_kernel, version, constants)
    assert found.metadata.shared <= SHARED[version] * 1024


def test_a_data_centre_s_card_takes_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_runtime, "capability", lambda index: (9, 0))
    assert stages_that_fit(3, 65536, CUDA) == 3
    monkeypatch.setattr(triton_runtime, "capability", lambda index: (8, 6))
    assert stages_that_fit(3, 65536, CUDA) == 2
