"""Comparisons that differ in more than their size are settings, each called by what tells it from the others."""

from __future__ import annotations

from dataclasses import replace

from dpscope.reports.report import compare_results, group_by_setting


def labels(*results):
    return [setting.label for setting in group_by_setting(compare_results(results))]


def test_a_setting_is_called_by_what_tells_it_apart(make_result):
    assert labels(make_result(), make_result(batch_size=4)) == [""]
    assert labels(make_result(), make_result(dtype="bf16")) == ["fp32", "bf16"]
    assert labels(make_result(), make_result(dtype="bf16"), make_result(dtype="bf16", steps=3)) == [
        "fp32",
        "bf16, 1 timed steps",
        "bf16, 3 timed steps",
    ]


def test_settings_that_no_words_tell_apart_are_numbered(make_result):
    first, second = (replace(make_result(), spec={**make_result().spec, "extra": [n]}) for n in (1, 2))
    assert labels(first, second) == ["the rest", "the rest (2)"]


def test_a_setting_holds_the_sizes_of_its_rows_in_the_order_they_came(make_result):
    results = [make_result(batch_size=size, dtype=dtype) for size in (4, 2) for dtype in ("fp32", "bf16")]
    settings = group_by_setting(compare_results(results))
    assert [[size.label for size in setting.sizes] for setting in settings] == [
        ["fp32: batch 4, sequence 8", "fp32: batch 2, sequence 8"],
        ["bf16: batch 4, sequence 8", "bf16: batch 2, sequence 8"],
    ]
