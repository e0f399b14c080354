"""Norms, clipped sums and update of kept per-sample gradients: 1.14B parameters in bfloat16, against plain torch."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from bench_fused_update import parameter_shapes
from measurement import Report, host_ms, largest_relative_error
from torch import Tensor

from dpscope.flash.gradients.memory_budget import allocated_on
from dpscope.flash.kernels import kept_gradients, tensor_lists
from dpscope.flash.kernels.fused_update import fused_adam_
from dpscope.flash.kernels.kept_gradients import kept_norms_squared, kept_sums
from dpscope.flash.kernels.tensor_lists import Cut

POSITIONS = 8192  # of a batch: 8 × 1024, 4 × 2048, 2 × 4096


def torch_norms(values: list[Tensor]) -> Tensor:
    return sum(torch.linalg.vector_norm(v.flatten(1), dim=1, dtype=torch.float32).square() for v in values)


def torch_sums(values: list[Tensor], factors: Tensor, outs: list[Tensor]) -> None:
    """Without the samples that are left out, which would take a pass of their own."""
    for v, out in zip(values, outs, strict=True):
        torch.mv(v.flatten(1).float().t(), factors, out=out.view(-1))


def norms_error(values: list[Tensor]) -> float:
    return largest_relative_error(kept_norms_squared(values), torch_norms(values).double())


def main() -> None:
    report = Report("kept_gradients: per-sample gradients of preset 1b in bfloat16, AdamW")
    source, target = (torch.empty(2**30, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    report.measure("2 GiB", "copy (torch): the ceiling", partial(target.copy_, source), nbytes=2**32)
    room = host_ms(partial(allocated_on, source.device))
    print(f"{'':<26} host time of asking for room in memory: {1e3 * room:.0f} µs")
    shapes = parameter_shapes()
    params, exp_avgs, exp_avg_sqs, sums = ([torch.zeros(shape, device="cuda") for shape in shapes] for _ in range(4))
    count = sum(param.numel() for param in params)
    adam = partial(
        fused_adam_, step=3, lr=1e-9, decoupled_weight_decay=True, grad_scale=1 / 64, noise_std=1.0, seed=1, offset=2
    )
    for batch in (8, 4, 2):
        label = f"{batch} × {POSITIONS // batch}"
        values = [torch.randn(batch, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        factors = torch.rand(batch, device="cuda")
        factors[0] = 0.0  # left out
        stored, state = 2 * batch * count, (params, values, exp_avgs, exp_avg_sqs)
        report.measure(
            label,
            "norms",
            partial(kept_norms_squared, values),
            nbytes=stored,
            error=partial(norms_error, values),
        )
        for chunk, block in product((32768, 65536), (2048, 4096, 8192, 16384)):
            kept_gradients.SAMPLE_CUT = Cut(chunk, block)
            report.measure(label, f"norms, {Cut(chunk, block)}", partial(kept_norms_squared, values), nbytes=stored)
        kept_gradients.SAMPLE_CUT = Cut(32768, 8192)
        report.measure(label, "norms by torch", partial(torch_norms, values), nbytes=stored)
        report.measure(label, "sums", partial(kept_sums, values, factors), nbytes=stored + 4 * count)
        report.measure(label, "sums added", partial(kept_sums, values, factors, outs=sums), nbytes=stored + 8 * count)
        report.measure(label, "sums by torch", partial(torch_sums, values, factors, sums), nbytes=stored + 4 * count)
        report.measure(label, "update", partial(adam, *state, factors=factors), nbytes=stored + 24 * count)
        for at_once, block in ((2, 1024), (4, 2048), (8, 1024), (8, 2048)):
            kept_gradients.SAMPLES_AT_ONCE, tensor_lists.CUT = at_once, Cut(16384, block)
            variant = f"update, {at_once} samples at once, block {block}"
            report.measure(label, variant, partial(adam, *state, factors=factors), nbytes=stored + 24 * count)
        kept_gradients.SAMPLES_AT_ONCE, tensor_lists.CUT = 4, Cut(16384, 1024)
        ready = partial(adam, params, sums, exp_avgs, exp_avg_sqs)
        report.measure(label, "update of sums that are there", ready, nbytes=28 * count)
        for name, call in (
            ("norms", partial(kept_norms_squared, values)),
            ("sums", partial(kept_sums, values, factors, outs=sums)),
            ("update", partial(adam, *state, factors=factors)),
        ):
            print(f"{label:<26} host time of one call: {name} {host_ms(call):.2f} ms")
        del values, state
    report.close()


if __name__ == "__main__":
    main()
