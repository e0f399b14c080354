"""`traffic.csv`, a line a row, and `traffic_kernels.csv`, a line a kernel: every figure, units in the column's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpscope.reports.export import line_identity
from dpscope.reports.output import csv_output
from dpscope.reports.tables import Row
from dpscope.reports.traffic.data import Traffic, by_size
from dpscope.results.payloads.ncu import BYTES, ESTIMATE, KERNEL_FIGURES, MEASURED, READ, WRITE


def _traffics(rows: Sequence[Row]) -> list[Traffic]:
    return [traffic for group in by_size(rows) for traffic in group]


def _identity(rows: Sequence[Row], traffic: Traffic) -> dict[str, Any]:
    return {**traffic.row.fields(*line_identity(rows), "optimizer"), "source": traffic.source}


def _figures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {
            **_identity(rows, t),
            "gpu": t.row.first.environment.get("gpu"),
            **{name: t.figure(name) for name in BYTES},
            "dram_bytes": t.dram_bytes,
            "dram_bytes_ratio_to_standard": t.ratio,
            "dram_bytes_per_item": t.bytes_per_item,
            "item": t.items[1],
            "flops": t.flops,
            "flops_source": None if t.flops is None else ESTIMATE if t.flops_estimated else MEASURED,
            "arithmetic_intensity_flops_per_byte": t.intensity,
            "median_step_ms": t.row.median_ms,
            "time_doubt": t.row.time_doubt or None,
            "dram_bytes_per_second": t.bandwidth,
            "flops_per_second": t.flop_rate,
            "fraction_of_measured_dram_ceiling": t.bandwidth_fraction,
            "ceiling_dram_bytes_per_second": t.ceilings.get("dram_bytes_per_second"),
            "ceiling_tensor_flops_per_second": t.ceilings.get("tensor_flops_per_second"),
            "ceiling_fp32_flops_per_second": t.ceilings.get("fp32_flops_per_second"),
            "estimated_dram_read_bytes": t.estimate.get(READ),
            "estimated_dram_write_bytes": t.estimate.get(WRITE),
            "estimate_error_dram_read_fraction": t.estimate_error(READ),
            "estimate_error_dram_write_fraction": t.estimate_error(WRITE),
            "ncu_version": t.data.get("ncu_version"),
            "reason": t.data.get("reason"),
        }
        for t in _traffics(rows)
    ]


def _kernels(rows: Sequence[Row]) -> list[dict[str, Any]]:
    names = ("family", "phase", *KERNEL_FIGURES)
    return [
        {**_identity(rows, t), "kernels_source": t.kernels.source, "kernel": kernel["name"]}
        | {name: kernel.get(name) for name in names}
        for t in _traffics(rows)
        if t.kernels
        for kernel in t.kernels.rows
    ]


TRAFFIC_CSV = (
    csv_output("traffic.csv", "bytes, operations and rates of each row", _figures, instrument="ncu"),
    csv_output("traffic_kernels.csv", "bytes of each kernel", _kernels, instrument="ncu"),
)
