"""Metrics of ncu, the figures (weighted sums) made of them, and the nvprof names that people still type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dpscope.results.payloads.ncu import Counted

SECTOR_BYTES = 32  # what L2 counts in

PASSES = "profiler__replayer_passes"  # how often the range or the kernel was run
GPU_TIME = "gpu__time_duration.sum"  # ns; of one kernel a time, of a range that was replayed none
DRAM_READ, DRAM_WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
L2_READ, L2_WRITE = "lts__t_sectors_op_read.sum", "lts__t_sectors_op_write.sum"
L2_ATOM, L2_RED = "lts__t_sectors_op_atom.sum", "lts__t_sectors_op_red.sum"
L2_TEX_READ, L2_TEX_WRITE = "lts__t_sectors_srcunit_tex_op_read.sum", "lts__t_sectors_srcunit_tex_op_write.sum"
LSU_LOAD = "l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum"
LSU_STORE = "l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum"
# Hopper's copy engine (TMA) feeds GEMMs past the load/store unit: without it their traffic is badly undercounted.
TMA_LOAD = "l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum"
TMA_STORE = "l1tex__m_l1tex2xbar_write_bytes_mem_global_op_tma_st.sum"
TMA_REDUCE = "l1tex__m_l1tex2xbar_write_bytes_mem_global_op_tma_red.sum"
CP_ASYNC = "l1tex__t_bytes_pipe_lsu_mem_global_op_ldgsts_cache_access.sum"
# Everything that crosses between L2 and the SMs, whichever unit asked for it.
XBAR_READ, XBAR_WRITE = "l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum"
TENSOR_OPS = tuple(f"sm__ops_path_tensor_src_{kind}_dst_fp32.sum" for kind in ("bf16", "tf32", "fp16"))
TENSOR_OPS_OF = {"bf16": TENSOR_OPS[0], "tf32": TENSOR_OPS[1], "fp32": TENSOR_OPS[1], "fp16": TENSOR_OPS[2]}  # by dtype
FADD, FMUL, FFMA = (f"smsp__sass_thread_inst_executed_op_{op}_pred_on.sum" for op in ("fadd", "fmul", "ffma"))

# A whole step, in one pass on Hopper: every further pass runs the program again, and is paid for in seconds. What
# crosses to each SM costs two passes more, what the copy engine alone moved others: `--metrics xbar,tma`. Two kinds of
# tensor operations do not fit either, so the kind is that of the step's dtype. FP32 operations ncu counts by rewriting
# a kernel's instructions, which it cannot do in a range ("Metric … is not supported in range replay").
RANGE_METRICS = (
    *(GPU_TIME, DRAM_READ, DRAM_WRITE, L2_READ, L2_WRITE, L2_ATOM, L2_RED, L2_TEX_READ, L2_TEX_WRITE),
    *(LSU_LOAD, LSU_STORE),
)
# One kernel at a time: only what fits in one pass, so that no kernel runs twice and no memory is saved and restored for
# it. Tensor operations are counted too where they fit (`running.one_pass_metrics`).
KERNEL_METRICS = (GPU_TIME, DRAM_READ, DRAM_WRITE, L2_TEX_READ, L2_TEX_WRITE)

# Groups that cost passes of their own, and what nvprof called the rest; ncu refuses the old names. nvprof gave rates:
# here a rate is the figure over a step's time.
METRIC_ALIASES: dict[str, tuple[str, ...]] = {
    "xbar": (XBAR_READ, XBAR_WRITE),
    "tma": (TMA_LOAD, TMA_STORE, TMA_REDUCE),
    "cp_async": (CP_ASYNC,),
    "dram_read_throughput": (DRAM_READ,),
    "dram_write_throughput": (DRAM_WRITE,),
    "l2_read_throughput": (L2_READ, L2_ATOM, L2_RED),
    "l2_write_throughput": (L2_WRITE, L2_ATOM, L2_RED),
    "gld_throughput": (LSU_LOAD,),
    "gst_throughput": (LSU_STORE,),
}


@dataclass(frozen=True)
class Formula:
    """A weighted sum of raw metrics. `if_there`: metrics that older chips lack, where they count as zero."""

    terms: Mapping[str, int]
    if_there: Mapping[str, int] = field(default_factory=dict)

    def missing(self, values: Mapping[str, float]) -> list[str]:
        return [name for name in self.terms if name not in values]

    def value(self, values: Mapping[str, float]) -> int:
        weighted = {**self.terms, **self.if_there}
        return round(sum(weight * values.get(name, 0) for name, weight in weighted.items()))


def _sectors(*names: str) -> Formula:
    return Formula(dict.fromkeys(names, SECTOR_BYTES))


# Figure -> how it is made, the best way first. Atomics and reductions read and write L2, so they count on both sides.
TRAFFIC_FORMULAS: dict[str, tuple[Formula, ...]] = {
    "dram_read_bytes": (Formula({DRAM_READ: 1}),),
    "dram_write_bytes": (Formula({DRAM_WRITE: 1}),),
    "l2_read_bytes": (_sectors(L2_READ, L2_ATOM, L2_RED),),
    "l2_write_bytes": (_sectors(L2_WRITE, L2_ATOM, L2_RED),),
    "l2_tex_read_bytes": (_sectors(L2_TEX_READ),),
    "l2_tex_write_bytes": (_sectors(L2_TEX_WRITE),),
    # What L2 gave to the SMs and took from them, whichever unit asked. A tile that L2 sends to several SMs at once (TMA
    # multicast) counts once here, and once for each SM in XBAR_READ.
    "l2_to_sm_bytes": (_sectors(L2_TEX_READ), Formula({XBAR_READ: 1}), Formula({LSU_LOAD: 1}, {TMA_LOAD: 1})),
    "sm_to_l2_bytes": (
        _sectors(L2_TEX_WRITE),
        Formula({XBAR_WRITE: 1}),
        Formula({LSU_STORE: 1}, {TMA_STORE: 1, TMA_REDUCE: 1}),
    ),
    "global_load_bytes": (Formula({LSU_LOAD: 1}),),
    "global_store_bytes": (Formula({LSU_STORE: 1}),),
}
# A fused multiply-add is two operations; ncu's tensor counters already say so.
FLOP_FORMULAS: dict[str, tuple[Formula, ...]] = {
    "tensor": tuple(Formula({name: 1}, dict.fromkeys(TENSOR_OPS, 1)) for name in TENSOR_OPS),
    "fp32": (Formula({FADD: 1, FMUL: 1, FFMA: 2}),),
}


def resolve_metrics(names: Iterable[str]) -> list[str]:
    """Return ncu's names for a list that may hold nvprof's, each once."""
    return list(dict.fromkeys(metric for name in names for metric in METRIC_ALIASES.get(name, (name,))))


def make_figures(
    values: Mapping[str, float], formulas: Mapping[str, tuple[Formula, ...]]
) -> tuple[dict[str, int], dict[str, str]]:
    """Make figures from raw metrics; for each that cannot be made, return the metrics it lacks."""
    figures: dict[str, int] = {}
    lacking: dict[str, str] = {}
    for figure, ways in formulas.items():
        way = next((way for way in ways if not way.missing(values)), None)
        if way is None:
            lacking[figure] = f"needs {', '.join(ways[0].missing(values))}, which the report does not hold"
        else:
            figures[figure] = way.value(values)
    return figures, lacking


def make_flops(values: Mapping[str, float]) -> dict[str, int]:
    """Return the operations by unit, and their total if every unit was counted."""
    flops, lacking = make_figures(values, FLOP_FORMULAS)
    return flops if lacking else {**flops, "total": sum(flops.values())}


def summarise_range(values: Mapping[str, float]) -> Counted:
    """Return a range as results hold it: figures, operations, raw metrics, and figures that could not be made."""
    traffic, lacking = make_figures(values, TRAFFIC_FORMULAS)
    return {"traffic": traffic, "flops": make_flops(values), "metrics": dict(values), "missing": lacking}
