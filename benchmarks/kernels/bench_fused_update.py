"""Noise and optimizer step in one pass over 1.14B parameters, against torch.optim and separate noise."""

from __future__ import annotations

from functools import partial

import torch
from measurement import FF, LAYERS, VOCABULARY, D, Report, host_ms

from dpscope.flash.kernels import tensor_lists
from dpscope.flash.kernels.fused_update import fused_adam_, fused_sgd_
from dpscope.flash.kernels.noise import add_noise_

POSITIONS = 1024


def parameter_shapes() -> list[tuple[int, ...]]:
    """The decoder transformer of preset 1b: biases and norms included, so that small tensors have their share."""
    layer: list[tuple[int, ...]] = [
        *[(D, D)] * 4,
        *[(D,)] * 4,
        (FF, D),
        (FF,),
        (D, FF),
        (D,),
        *[(D,)] * 4,
    ]
    return [(VOCABULARY, D), (POSITIONS, D), *layer * LAYERS, (D,), (D,), (VOCABULARY, D)]


def main() -> None:
    report = Report("fused_update: AdamW over the parameters of preset 1b")
    shapes = parameter_shapes()
    params = [torch.randn(shape, device="cuda") * 0.02 for shape in shapes]
    sums = [torch.randn(shape, device="cuda") for shape in shapes]
    exp_avgs = [torch.zeros_like(param) for param in params]
    exp_avg_sqs = [torch.zeros_like(param) for param in params]
    count = sum(param.numel() for param in params)
    label = f"{count / 1e9:.2f}B in {len(params)} tensors"
    adam = partial(
        fused_adam_,
        params,
        sums,
        exp_avgs,
        exp_avg_sqs,
        step=3,
        lr=1e-9,
        weight_decay=0.01,
        decoupled_weight_decay=True,
        grad_scale=1 / 64,
        seed=1,
        offset=2,
    )
    report.measure(label, "fused_adam_, noise", partial(adam, noise_std=1.0), nbytes=28 * count)
    report.measure(label, "fused_adam_, no noise", adam, nbytes=28 * count)
    torch.cuda.synchronize()
    print(f"{label:<26} host time of one call {host_ms(partial(adam, noise_std=1.0)):.2f} ms")
    report.measure(
        label,
        "fused_sgd_ with momentum, noise",
        lambda: fused_sgd_(params, sums, exp_avgs, lr=1e-9, momentum=0.9, noise_std=1.0, offset=3),
        nbytes=20 * count,
    )
    report.measure(label, "add_noise_", lambda: add_noise_(sums, 1.0, 1.0, 1, 2), nbytes=8 * count)
    scratch = torch.empty(2**30, device="cuda")
    report.measure("2^30 floats", "normal_ (torch)", scratch.normal_, nbytes=4 * scratch.numel())
    report.measure(
        "2^30 floats",
        "add_noise_ (zeros, then noise)",
        lambda: add_noise_([torch.zeros(2**30, device="cuda")], 1.0, 1.0, 1, 2),
        nbytes=12 * 2**30,
    )
    for chunk, block in ((8192, 1024), (32768, 1024), (16384, 2048)):
        tensor_lists.CUT = tensor_lists.Cut(chunk, block)
        variant = f"fused_adam_, noise, chunk {chunk} block {block}"
        report.measure(label, variant, partial(adam, noise_std=1.0), nbytes=28 * count)
    reference(report, label, params, sums)
    report.close()


def reference(report: Report, label: str, params: list[torch.Tensor], sums: list[torch.Tensor]) -> None:
    leaves = [torch.nn.Parameter(param) for param in params]
    for leaf, total in zip(leaves, sums, strict=True):
        leaf.grad = total
    optimizer = torch.optim.AdamW(leaves, lr=1e-9, weight_decay=0.01, fused=True)
    report.measure(
        label,
        "torch.optim.AdamW(fused=True), no noise",
        optimizer.step,
        nbytes=28 * sum(param.numel() for param in params),
    )


if __name__ == "__main__":
    main()
