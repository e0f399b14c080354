"""Figures from raw metrics: exact on a real report, honest about what is not there."""

from __future__ import annotations

import pytest

from dpscope.instruments.ncu import metrics
from dpscope.instruments.ncu.metrics import (
    FLOP_FORMULAS,
    METRIC_ALIASES,
    TRAFFIC_FORMULAS,
    make_figures,
    make_flops,
    resolve_metrics,
    summarise_range,
)
from dpscope.instruments.ncu.reading import read_report
from dpscope.vocabulary.settings import DTYPES


@pytest.fixture(scope="module")
def step(ncu_captures):
    (action,) = read_report(ncu_captures["range"])
    return action.metrics


def test_the_bytes_of_a_real_step_are_exact(step):
    """By hand from what the report shows in ncu-ui; a sector is 32 bytes."""
    traffic = summarise_range(step)["traffic"]
    assert traffic == {
        "dram_read_bytes": 1_135_307_776,
        "dram_write_bytes": 1_014_021_632,
        "l2_read_bytes": 32 * (107_080_132 + 3_484 + 589_824),
        "l2_write_bytes": 32 * (55_096_402 + 3_484 + 589_824),
        "l2_to_sm_bytes": 1_982_042_240 + 2_584_739_840,  # load/store unit and copy engine
        "sm_to_l2_bytes": 1_041_868_896 + 142_016_512,
        "global_load_bytes": 1_982_042_240,
        "global_store_bytes": 1_041_868_896,
    }
    assert all(isinstance(value, int) for value in traffic.values())


def test_a_figure_that_cannot_be_made_says_what_it_lacks(step):
    missing = summarise_range(step)["missing"]
    assert set(missing) == {"l2_tex_read_bytes", "l2_tex_write_bytes"}
    assert "lts__t_sectors_srcunit_tex_op_read.sum" in missing["l2_tex_read_bytes"]


def test_operations_without_the_fp32_counters_have_no_total(step):
    assert make_flops(step) == {"tensor": 108_582_141_952}


def test_a_fused_multiply_add_is_two_operations():
    counted = {metrics.FADD: 10.0, metrics.FMUL: 100.0, metrics.FFMA: 1000.0, metrics.TENSOR_OPS[0]: 7.0}
    assert make_flops(counted) == {"tensor": 7, "fp32": 2110, "total": 2117}


def test_every_number_format_of_the_tensor_cores_counts():
    bf16, tf32, fp16 = metrics.TENSOR_OPS
    assert make_figures({bf16: 1.0, tf32: 20.0, fp16: 300.0}, FLOP_FORMULAS)[0]["tensor"] == 321
    assert make_figures({tf32: 20.0}, FLOP_FORMULAS)[0]["tensor"] == 20


def test_a_chip_without_a_copy_engine_has_moved_nothing_by_it():
    """Ampere knows no TMA metrics; its loads are those of the load/store unit."""
    figures, _ = make_figures({metrics.LSU_LOAD: 5.0, metrics.LSU_STORE: 3.0}, TRAFFIC_FORMULAS)
    assert (figures["l2_to_sm_bytes"], figures["sm_to_l2_bytes"]) == (5, 3)


def test_what_l2_gives_to_the_sms_is_counted_at_l2_where_it_was_else_at_the_crossbar():
    values = {metrics.L2_TEX_READ: 2.0, metrics.XBAR_READ: 99.0, metrics.LSU_LOAD: 5.0, metrics.TMA_LOAD: 1.0}
    assert make_figures(values, TRAFFIC_FORMULAS)[0]["l2_to_sm_bytes"] == 2 * 32
    del values[metrics.L2_TEX_READ]
    assert make_figures(values, TRAFFIC_FORMULAS)[0]["l2_to_sm_bytes"] == 99


def test_the_load_store_unit_alone_is_never_taken_for_all_that_a_step_asks_for():
    """A step on Hopper loads its tiles past it: with what a step is asked for by default, L2 is what counts."""
    values = dict.fromkeys(metrics.RANGE_METRICS, 1.0)
    assert make_figures(values, TRAFFIC_FORMULAS)[0]["l2_to_sm_bytes"] == metrics.SECTOR_BYTES


def test_every_dtype_of_a_step_has_its_tensor_operations():
    assert set(DTYPES) <= set(metrics.TENSOR_OPS_OF)
    assert set(metrics.TENSOR_OPS_OF.values()) == set(metrics.TENSOR_OPS)


@pytest.mark.parametrize(
    ("nvprof", "figure"),
    [
        ("dram_read_throughput", "dram_read_bytes"),
        ("dram_write_throughput", "dram_write_bytes"),
        ("l2_read_throughput", "l2_read_bytes"),
        ("l2_write_throughput", "l2_write_bytes"),
        ("gld_throughput", "global_load_bytes"),
        ("gst_throughput", "global_store_bytes"),
    ],
)
def test_each_name_of_nvprof_brings_what_its_figure_is_made_of(nvprof, figure):
    values = dict.fromkeys(resolve_metrics([nvprof]), 1.0)
    assert figure in make_figures(values, TRAFFIC_FORMULAS)[0]


def test_no_alias_reaches_ncu():
    assert len(METRIC_ALIASES) == 6 + 3  # nvprof's, and ours for groups that cost passes
    resolved = resolve_metrics([*METRIC_ALIASES, "sm__cycles_active.avg", *METRIC_ALIASES])
    assert not set(resolved) & set(METRIC_ALIASES)
    assert len(resolved) == len(set(resolved))
    assert resolved[-1] == "sm__cycles_active.avg"


def test_every_figure_can_be_made_of_what_is_asked_for():
    values = dict.fromkeys((*metrics.RANGE_METRICS, metrics.TENSOR_OPS_OF["bf16"]), 1.0)
    assert summarise_range(values)["missing"] == {}
    assert set(make_flops(values)) == {"tensor"}  # FP32 operations cannot be counted in a range
