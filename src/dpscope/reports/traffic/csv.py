"""`traffic.csv`, a line a row, and `traffic_kernels.csv`, a line a kernel: every figure, units in the column's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dpscope.reports.output import csv_output
from dpscope.reports.tables import Row
from dpscope.reports.traffic.data import ESTIMATE, MEASURED, READ, WRITE, Traffic, compare_traffic

Column = Callable[[Traffic], Any]


def _setting(name: str) -> Column:
    return lambda t: t.row.first.spec.get(name)


def _figure(name: str) -> Column:
    return lambda t: t.figure(name)


# What tells rows apart.
_NAMES: dict[str, Column] = {
    "model": lambda t: t.row.first.spec["workload"]["name"],
    "method": lambda t: t.row.method,
    **{name: _setting(name) for name in ("batch_size", "seq_len", "dtype", "optimizer")},
    "source": lambda t: t.source,
}

_BYTES = (
    *(READ, WRITE, "l2_read_bytes", "l2_write_bytes", "l2_tex_read_bytes", "l2_tex_write_bytes"),
    *("l2_to_sm_bytes", "sm_to_l2_bytes", "global_load_bytes", "global_store_bytes"),
)

_COLUMNS: dict[str, Column] = {
    **_NAMES,
    "gpu": lambda t: t.row.first.environment.get("gpu"),
    **{name: _figure(name) for name in _BYTES},
    "dram_bytes": lambda t: t.dram_bytes,
    "dram_bytes_ratio_to_standard": lambda t: t.ratio,
    "dram_bytes_per_item": lambda t: t.bytes_per_item,
    "item": lambda t: t.items[1],
    "flops": lambda t: t.flops,
    "flops_source": lambda t: None if t.flops is None else ESTIMATE if t.flops_estimated else MEASURED,
    "arithmetic_intensity_flops_per_byte": lambda t: t.intensity,
    "median_step_ms": lambda t: t.row.median_ms,
    "time_doubt": lambda t: t.row.time_doubt or None,
    "dram_bytes_per_second": lambda t: t.bandwidth,
    "flops_per_second": lambda t: t.flop_rate,
    "fraction_of_measured_dram_ceiling": lambda t: t.bandwidth_fraction,
    "ceiling_dram_bytes_per_second": lambda t: t.ceilings.get("dram_bytes_per_second"),
    "ceiling_tensor_flops_per_second": lambda t: t.ceilings.get("tensor_flops_per_second"),
    "ceiling_fp32_flops_per_second": lambda t: t.ceilings.get("fp32_flops_per_second"),
    "estimated_dram_read_bytes": lambda t: t.estimate.get(READ),
    "estimated_dram_write_bytes": lambda t: t.estimate.get(WRITE),
    "estimate_error_dram_read_fraction": lambda t: t.estimate_error(READ),
    "estimate_error_dram_write_fraction": lambda t: t.estimate_error(WRITE),
    "ncu_version": lambda t: t.data.get("ncu_version"),
    "reason": lambda t: t.data.get("reason"),
}

_OF_KERNEL = ("name", "family", "phase", "calls", READ, WRITE, "l2_to_sm_bytes", "flops", "time_ns")


def _traffic(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [{name: column(traffic) for name, column in _COLUMNS.items()} for traffic in compare_traffic(rows)]


def _kernels(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {
            **{name: column(traffic) for name, column in _NAMES.items()},
            "kernels_source": found.source,
            **{"kernel" if key == "name" else key: kernel.get(key) for key in _OF_KERNEL},
        }
        for traffic in compare_traffic(rows)
        if (found := traffic.kernels)
        for kernel in found.rows
    ]


TRAFFIC_CSV = (
    csv_output("traffic.csv", "bytes, operations and rates of each row", _traffic, instrument="ncu"),
    csv_output("traffic_kernels.csv", "bytes of each kernel", _kernels, instrument="ncu"),
)
