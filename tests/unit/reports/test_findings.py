"""Findings: what costs most comes first, each with why and what to do."""

from __future__ import annotations

from dataclasses import replace

from dpscope.reports.findings import list_findings, to_markdown
from dpscope.reports.report import Report


def findings_of(*results):
    return list_findings(Report.of(results))


def test_the_costliest_method_comes_first_and_says_what_it_holds(measured_both_ways):
    found = findings_of(*measured_both_ways())
    assert [finding.cost for finding in found] == sorted((finding.cost for finding in found), reverse=True)
    first = found[0]
    assert "the memory of ordinary training" in first.statement
    assert "at the peak" in first.why
    assert first.sure == "measured"


def test_a_row_that_failed_comes_before_all_and_keeps_its_reason(make_result):
    failed = replace(make_result(method="ghost"), status="oom", reason="out of memory", timing={})
    found = findings_of(make_result(), make_result(method="flat", median=25.0), failed)
    assert (found[0].method, found[0].why, found[0].sure) == ("ghost", "out of memory", "certain")


def test_a_doubtful_time_is_no_cost(make_result):
    result = make_result(method="flat", median=500.0)
    timing = {**result.timing, "step_ms": [500.0, 500.0]}
    found = findings_of(make_result(), replace(result, timing=timing))
    doubtful = [finding for finding in found if finding.sure == "doubtful"]
    assert [finding.statement for finding in doubtful] == ["No verdict on the time of flat"]
    assert doubtful[0].cost is None and "--steps" in doubtful[0].advice


def test_markdown_is_a_numbered_list(make_result):
    text = to_markdown(findings_of(make_result(), make_result(method="flat", median=25.0)))
    assert text.startswith("# Findings\n\n1. flat costs ")
    assert to_markdown([]).endswith("no private method has figures.\n")
