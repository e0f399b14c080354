"""The two ceilings of a roofline, DRAM bandwidth and arithmetic, measured and not taken from a data sheet.

A large copy for DRAM bandwidth, large square matrix products for arithmetic. Run it without a profiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpscope.results.payloads.ncu import Ceilings

COPY_BYTES = 2 * 2**30
GEMM_SIDE = 8192
CEILING_REPEATS = 10


def measure_ceilings(device: str) -> Ceilings:
    """Measure the best of several repeats. Empty without a GPU: a CPU's caches and clocks give no single roof."""
    if device != "cuda":
        return {}
    best_copy = _best_seconds(*_copy())
    tensor, single = (_best_seconds(*_gemm(dtype)) for dtype in (torch.bfloat16, torch.float32))
    flops = 2 * GEMM_SIDE**3
    torch.cuda.empty_cache()
    return {
        "dram_bytes_per_second": 2 * COPY_BYTES / best_copy,  # read once, written once
        "tensor_flops_per_second": flops / tensor,
        "fp32_flops_per_second": flops / single,
        "how": (
            f"best of {CEILING_REPEATS}: a copy of {COPY_BYTES // 2**30} GiB, and {GEMM_SIDE}×{GEMM_SIDE} matrix "
            "products in bf16 (tensor cores) and fp32 (without TF32)"
        ),
    }


def _copy() -> tuple[Any, ...]:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    return torch.empty_like(source).copy_, source


def _gemm(dtype: torch.dtype) -> tuple[Any, ...]:
    # Ordinary numbers: a product of zeros draws less power and would raise the roof.
    a, b = (torch.randn(GEMM_SIDE, GEMM_SIDE, device="cuda", dtype=dtype) for _ in range(2))
    return torch.mm, a, b


def _best_seconds(operation: Any, *operands: Tensor) -> float:
    times: list[float] = []
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for _ in range(CEILING_REPEATS + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            operation(*operands)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    finally:
        torch.set_float32_matmul_precision(precision)
    return min(times[2:])  # the first two hold the choice of a kernel and the way up of the clocks
