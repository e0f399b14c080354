"""Per-sample sums of biases and norm layers, against plain torch."""

from __future__ import annotations

from functools import partial

import torch
from measurement import D, Report, host_ms, largest_relative_error

from dpscope.flash.kernels.rms_norm import by_torch, rms_norm_gradients
from dpscope.flash.kernels.sample_sums import bias_sums, layer_norm_sums


def plain_layer_norm_sums(
    g: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    normal = (x.float() - mean[..., None]) * rstd[..., None]
    return (g.float() * normal).sum(1), g.float().sum(1)


def main() -> None:
    report = Report("sample_sums: per-sample sums over positions")
    for batch, length in [(8, 1024), (16, 256), (1, 16384)]:
        for dtype in (torch.float32, torch.bfloat16):
            one_shape(report, batch, length, dtype)
    report.close()


def one_shape(report: Report, batch: int, length: int, dtype: torch.dtype) -> None:
    shape = f"B={batch} T={length} {str(dtype).removeprefix('torch.')}"
    g, x = (torch.randn(batch, length, D, device="cuda", dtype=dtype) for _ in range(2))
    mean, rstd = torch.randn(batch, length, device="cuda"), torch.rand(batch, length, device="cuda")
    exact = (g.double() * (x.double() - mean[..., None]) * rstd[..., None]).sum(1)
    size = g.numel() * g.element_size()

    report.measure(shape, "bias", partial(bias_sums, g), nbytes=size)
    weight = torch.rand(D, device="cuda", dtype=dtype)
    for variant, call in (
        ("RMSNorm: plain torch", partial(by_torch, g, x, weight, 1e-6, needs_x=True, needs_weight=True)),
        ("RMSNorm: kernel", partial(rms_norm_gradients, g, x, weight, 1e-6)),
    ):
        report.measure(shape, variant, call, nbytes=3 * size, note=f"host {1e3 * host_ms(call):.0f} µs")
    for variant, call in (
        ("LayerNorm: plain torch", partial(plain_layer_norm_sums, g, x, mean, rstd)),
        ("LayerNorm: kernel", partial(layer_norm_sums, g, x, mean, rstd)),
    ):
        error = partial(lambda call: largest_relative_error(call()[0], exact), call)
        report.measure(shape, variant, call, nbytes=2 * size, error=error, note=f"host {1e3 * host_ms(call):.0f} µs")


if __name__ == "__main__":
    main()
