"""Conditions for pipelines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpscope.errors import UserError
from dpscope.reports.findings import Condition
from dpscope.reports.report import compare_results


@pytest.fixture
def rows(make_result):
    return compare_results([make_result(), make_result(method="flash", median=25.0)])


def test_a_condition_that_holds_says_where(rows):
    ratio = rows[1].time_ratio
    assert Condition.parse(f"flash.time > {ratio - 0.1:.3f}").judge(rows).startswith("flash.time > ")
    assert Condition.parse(f"flash.time>{ratio + 0.1:.3f}").judge(rows) == ""
    assert "is 25 at" in Condition.parse("flash.ms >= 25").judge(rows)
    assert Condition.parse("flash.ms < 25").judge(rows) == ""


def test_what_is_not_known_does_not_pass(rows, make_result):
    assert "not known" in Condition.parse("ghost.time > 1.2").judge(rows)
    failed = replace(make_result(method="flash"), status="failed", reason="it broke", timing={})
    assert "not known" in Condition.parse("flash.time > 1.2").judge(compare_results([make_result(), failed]))


@pytest.mark.parametrize(
    "text", ["flash", "flash.time", "flash.speed > 1", "flash.time = 1", "flash.time > much", "> 1"]
)
def test_other_text_is_refused_with_an_example(text):
    with pytest.raises(UserError, match=r"flash\.time > 1\.2"):
        Condition.parse(text)
