"""Results side by side: what is divided by what, and where there is nothing to divide by."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpscope.reports.report import Report, compare_results
from dpscope.reports.tables import UNSTEADY, group_by_size, worth_a_column
from dpscope.results.schema import parse_result
from dpscope.vocabulary.statuses import STATUSES


def ratios(results):
    return [(row.method, row.time_ratio, row.memory_ratio) for row in compare_results(results)]


def test_each_method_is_divided_by_standard_of_the_same_size(make_result):
    results = [
        make_result(method="standard", median=10.0, peak=100),
        make_result(method="flat", median=25.0, peak=400),
        make_result(method="standard", median=100.0, peak=1000, batch_size=4),
        make_result(method="flat", median=150.0, peak=3000, batch_size=4),
    ]
    assert ratios(results) == [
        ("standard", 1.0, 1.0),
        ("flat", 2.5, 4.0),
        ("standard", 1.0, 1.0),
        ("flat", 1.5, 3.0),
    ]


def test_the_order_of_results_does_not_matter_to_the_ratios(make_result):
    results = [make_result(method="flat", median=25.0), make_result(method="standard", median=10.0)]
    assert [ratio for _, ratio, _ in ratios(results)] == [2.5, 1.0]


@pytest.mark.parametrize("difference", [{"seq_len": 16}, {"batch_size": 3}, {"dtype": "bf16"}, {"optimizer": "sgd"}])
def test_a_standard_that_differs_in_anything_else_is_no_denominator(make_result, difference):
    results = [make_result(method="standard", **difference), make_result(method="flat")]
    assert ratios(results)[1] == ("flat", None, None)


def test_instruments_that_looked_at_other_numbers_of_steps_are_joined(make_result):
    results = [make_result(steps=10, median=20.0), make_result(steps=1, instrument="memory", peak=7)]
    (row,) = compare_results(results)
    assert (row.median_ms, row.memory["peak_bytes"]) == (20.0, 7)


def test_what_one_instrument_saw_belongs_to_each_row_that_another_s_steps_keep_apart(make_result):
    memory = make_result(steps=1, instrument="memory", peak=7)
    report = Report.of([make_result(steps=2, median=20.0), make_result(steps=3, median=30.0), memory])
    assert [(row.repeats["steps"], row.median_ms, row.memory["peak_bytes"]) for row in report.rows] == [
        (2, 20.0, 7),
        (3, 30.0, 7),
    ]
    assert [row.repeats["steps"] for row in report.rows_of("memory")] == [2]
    assert report.rows_of("time") == report.rows


def test_one_instrument_at_two_numbers_of_steps_makes_rows_that_are_not_compared(make_result):
    results = [make_result(method=m, steps=n, median=t) for n in (2, 3) for m, t in (("standard", n), ("flat", 4 * n))]
    assert [(method, ratio) for method, ratio, _ in ratios(results)] == [("standard", 1), ("flat", 4)] * 2
    assert len(group_by_size(compare_results(results))) == 2


def test_without_standard_there_are_no_ratios_but_the_figures_stay(make_result):
    (row,) = compare_results([make_result(method="ghost", median=5.0, peak=77)])
    assert (row.time_ratio, row.memory_ratio) == (None, None)
    assert (row.median_ms, row.peak_bytes) == (5.0, 77)


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "ok"])
def test_a_standard_that_is_not_ok_is_no_denominator_whatever_figures_it_left(make_result, status):
    results = [replace(make_result(method="standard"), status=status), make_result(method="flat")]
    assert ratios(results)[1] == ("flat", None, None)


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "ok"])
def test_a_row_that_is_not_ok_has_no_figures_and_no_ratios(make_result, status):
    _, row = compare_results([make_result(method="standard"), make_result(method="flat", status=status)])
    assert (row.time_ratio, row.memory_ratio, row.median_ms, row.spread_ms, row.peak_bytes) == (None,) * 5


def test_a_figure_that_is_missing_leaves_the_other_ratio_standing(make_result):
    without_memory = replace(make_result(method="flat", median=30.0), memory={}, peak_memory_mb=None)
    assert ratios([make_result(median=10.0), without_memory])[1] == ("flat", 3.0, None)


def test_a_file_with_nothing_but_older_keys_has_its_mean_and_its_peak(make_result):
    older = [
        replace(make_result(method=method), timing={}, memory={}, avg_time_ms=mean, peak_memory_mb=peak)
        for method, mean, peak in (("standard", 10.0, 4.0), ("ghost", 25.0, 6.0))
    ]
    assert ratios(older)[1] == ("ghost", 2.5, 1.5)
    assert compare_results(older)[1].peak_bytes == 6 * 2**20
    assert compare_results(older)[1].spread_ms is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, "fast", True, None])
def test_a_figure_that_is_no_measurement_is_none(make_result, bad):
    result = make_result()
    timing, memory = {"median_ms": bad, "p10_ms": bad, "p90_ms": 3.0}, {"peak_bytes": bad}
    damaged = replace(result, timing=timing, memory=memory, avg_time_ms=None, peak_memory_mb=None)
    (row,) = compare_results([damaged])
    assert (row.median_ms, row.spread_ms, row.peak_bytes, row.time_ratio) == (None, None, None, None)


def test_nothing_is_divided_by_zero(make_result):
    assert ratios([make_result(median=0.0, peak=0), make_result(method="flat")])[1] == ("flat", None, None)


def test_rows_are_grouped_by_size_in_the_order_they_came(make_result):
    results = [make_result(method=m, batch_size=b) for m in ("standard", "flat") for b in (4, 2)]
    groups = group_by_size(compare_results(results))
    assert [[(row.method, row.result.spec["batch_size"]) for row in group] for group in groups] == [
        [("standard", 4), ("flat", 4)],
        [("standard", 2), ("flat", 2)],
    ]


def test_rows_are_the_same_comparison_whatever_a_spec_holds(make_result):
    """A workload's description may hold lists and objects, and a file may say 1 for 1.0."""

    def row(**spec):
        return compare_results([replace(make_result(), spec={**make_result().spec, **spec})])[0]

    nested = {"name": "m", "lora": {"r": 4, "target": ["up", "down"]}}
    assert row(workload=nested, extra=[1, 2]).comparison == row(workload=nested, extra=[1, 2]).comparison
    assert row(noise_multiplier=1).comparison == row(noise_multiplier=1.0).comparison
    assert row(extra=[1, 2]).comparison != row(extra=[2, 1]).comparison
    assert row(workload={**nested, "seed": 1}).comparison != row(workload=nested, seed=1).comparison


def test_how_a_row_was_measured_is_no_part_of_what_it_is(make_result):
    time, memory = (
        compare_results([make_result(steps=10)]),
        compare_results([make_result(steps=1, instrument="memory")]),
    )
    assert time[0].identity == memory[0].identity
    assert {"method", "instrument", "options", "warmup", "steps"}.isdisjoint(time[0].identity)


def test_numbers_of_steps_are_a_part_of_rows_that_differ_in_nothing_else(make_result):
    rows = compare_results([make_result(steps=2), make_result(steps=3)])
    assert [row.identity["steps"] for row in rows] == [2, 3]
    assert worth_a_column(rows, ("dtype", "warmup", "steps")) == ["steps"]
    apart_by_instrument = compare_results(
        [make_result(steps=9), make_result(method="flat", steps=1, instrument="memory")]
    )
    assert worth_a_column(apart_by_instrument, ("steps",)) == []


def test_a_field_of_a_row_is_found_by_the_name_of_its_column(make_result):
    (row,) = compare_results([make_result(method="flat", batch_size=4, seq_len=8, steps=3)])
    names = ("model", "method", "batch_size", "seq_len", "steps", "colour")
    assert row.fields(*names) == dict(zip(names, (row.spec["workload"]["name"], "flat", 4, 8, 3, None), strict=True))


def test_a_column_of_sequences_is_there_only_if_any_row_has_one(make_result):
    text, images = make_result(seq_len=8), make_result(method="flat")
    images = replace(images, spec={**images.spec, "seq_len": None})
    names = ("method", "batch_size", "seq_len", "dtype")
    assert worth_a_column(compare_results([images]), names) == ["method", "batch_size"]
    assert worth_a_column(compare_results([images, text]), names) == ["method", "batch_size", "seq_len"]


def test_only_what_varies_is_worth_a_column(make_result):
    rows = compare_results([make_result(dtype="fp32"), make_result(dtype="bf16")])
    assert worth_a_column(rows, ("dtype", "optimizer")) == ["dtype"]
    assert worth_a_column(rows[:1], ("dtype", "optimizer")) == []


def test_the_ratio_of_a_row_timed_in_turns_is_the_median_of_its_pairs(make_result):
    """Alone, the rows' times say 2×: the host was slow when one of them ran."""
    ordinary, private = make_result(method="standard", median=10.0), make_result(method="flash", median=20.0)
    pairs = [1.2, 1.1, 1.3, 1.2, 1.2, 1.15, 1.25, 1.2]
    private = replace(private, timing={**private.timing, "in_turns": {"ratios": pairs, "steps": 5}})
    assert parse_result(private.to_json()) == private
    standard, flash = compare_results([ordinary, private])
    assert flash.time_ratio == pytest.approx(1.2)
    assert flash.ratio_spread == pytest.approx((1.135, 1.265))
    assert not flash.ratio_doubt
    assert (standard.time_ratio, standard.ratio_spread) == (1.0, (1.0, 1.0))
    shaky = replace(private, timing={**private.timing, "in_turns": {"ratios": [1.0, 2.0] * 4, "steps": 5}})
    assert compare_results([ordinary, shaky])[1].ratio_doubt == UNSTEADY
