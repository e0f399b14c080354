"""A busy machine's figures are shown, marked, and not made into a sentence."""

from __future__ import annotations

from dataclasses import replace

from dpscope.plain_text import render_plain
from dpscope.reports.report import Report, compare_results
from dpscope.reports.text import summary, verdict


def with_spread(result, low, high):
    return replace(result, timing={**result.timing, "p10_ms": low, "p90_ms": high})


def test_a_steady_row_gets_its_sentence(make_result):
    results = [make_result(median=10.0), make_result(method="ghost", median=20.0)]
    assert verdict(Report.of(results)) == [
        "Batch 2, sequence 8. ghost takes 2.00× the time and 1.00× the memory of ordinary training."
    ]


def test_an_unsteady_denominator_is_no_denominator(make_result):
    results = [with_spread(make_result(median=10.0), 5.0, 50.0), make_result(method="ghost", median=2.0)]
    (sentence,) = verdict(Report.of(results))
    assert "No verdict on the time of ghost" in sentence
    text = render_plain(summary(Report.of(results)))
    assert "0.20×?" in text
    assert "? marks a figure of time that is doubtful: step times varied by more than 1.5× within a row." in text


def test_an_unsteady_row_is_marked_alone(make_result):
    shaky = with_spread(make_result(method="flat", median=20.0), 10.0, 40.0)
    results = [make_result(median=10.0), shaky, make_result(method="ghost", median=20.0)]
    steady = {row.method: not row.ratio_doubt for row in compare_results(results)}
    assert steady == {"standard": True, "flat": False, "ghost": True}


def test_a_narrow_terminal_keeps_what_tells_rows_apart(make_result):
    results = [make_result(), make_result(batch_size=4), make_result(method="ghost", status="oom", batch_size=4)]
    text = render_plain(summary(Report.of(results), width=60), width=60)
    assert "p10–p90" not in text
    header = next(line for line in text.splitlines() if line.startswith("method"))
    assert "batch" in header and "seq" in header and "status" in header
