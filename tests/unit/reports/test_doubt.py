"""A doubtful figure carries its doubt wherever it is shown: text, page, CSV, LaTeX, pandas, against, figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dpscope.plain_text import render_plain
from dpscope.reports.against.data import set_against
from dpscope.reports.against.text import against_summary
from dpscope.reports.export import to_latex, to_records
from dpscope.reports.page.table import make_cards, make_table
from dpscope.reports.report import Report, compare_results
from dpscope.reports.story import tell
from dpscope.reports.tables import FEW, NO_SPREAD, UNSTEADY, doubt_of_times, explain, marked
from dpscope.reports.text import summary
from dpscope.reports.time_charts import draw_tradeoff, step_time
from dpscope.reports.trace.figures import operators, phases
from dpscope.units import MISSING
from tests.unit.reports.trace_results import make_trace, operator
from tests.unit.reports.writing import report_of


@pytest.mark.parametrize(
    ("spread", "steps", "doubt"),
    [
        ((10.0, 15.0), 5, ""),
        ((10.0, 15.1), 10, UNSTEADY),
        ((10.0, 10.0), 4, FEW),
        ((10.0, 40.0), 3, FEW),
        ((10.0, 11.0), None, ""),
        (None, 10, NO_SPREAD),
    ],
)
def test_times_are_doubtful_that_varied_were_few_or_have_no_spread(spread, steps, doubt):
    assert doubt_of_times(spread, steps) == doubt


def test_what_is_missing_is_not_doubtful_as_well():
    assert marked(MISSING, FEW) == MISSING
    assert marked("2.00×", FEW) == "2.00×?"
    assert explain(["", ""]) == ""


def few(result, steps=3):
    return replace(result, timing={**result.timing, "step_ms": [result.timing["median_ms"]] * steps})


def unsteady(result):
    median = result.timing["median_ms"]
    return replace(result, timing={**result.timing, "p10_ms": 0.5 * median, "p90_ms": 2 * median})


def unknown(result):
    return replace(result, timing={})


DOUBTS = {FEW: few, UNSTEADY: unsteady, NO_SPREAD: unknown}


@pytest.fixture(params=DOUBTS)
def doubtful(request, make_result):
    """(reason, rows): standard beyond doubt, flat not."""
    results = [make_result(median=10.0), DOUBTS[request.param](make_result(method="flat", median=25.0))]
    return request.param, results


def test_the_mark_is_in_every_table_figure_and_sentence(doubtful):
    reason, results = doubtful
    rows = compare_results(results)
    text = render_plain(summary(Report.of(results)))
    assert "25.0 ms?" in text and "2.50×?" in text and explain([reason]) in " ".join(text.split())
    latex = to_latex(rows)
    assert "25.0? & " in latex and "2.50? & " in latex and "marks a figure of time that is doubtful" in latex
    record = to_records(rows)[1]
    assert (record["time_doubt"], record["time_ratio_doubt"], record["time_steady"]) == (reason, reason, False)
    cells = {cell.text for cell in make_table(Report.of(results)).lines[1][2]}
    assert {"25.0 ms?", "2.50×?"} <= cells
    card = make_cards(report_of(rows).sizes[0], report_of(rows).stories[0])[1]["figures"][0]
    assert card["doubt"] and card["absolute"].startswith("25.0 ms?")
    view = step_time(rows).views[0]
    assert "25.0 ms? (2.50×?) with flat" in view.says and view.data["bars"][1]["marks"] == ["?", "?"]
    assert "doubtful" in draw_tradeoff(rows).get_suptitle()
    assert any(sentence.startswith("No verdict on the time of flat") for sentence in tell(rows).sentences)
    assert not any("2.50×" in sentence for sentence in tell(rows).sentences)


def test_what_is_beyond_doubt_has_no_mark(make_result):
    results = [make_result(median=10.0), make_result(method="flat", median=25.0)]
    rows = compare_results(results)
    assert "?" not in render_plain(summary(Report.of(results)))
    assert "?" not in to_latex(rows)
    assert {record["time_doubt"] for record in to_records(rows)} == {None}


def test_a_doubtful_standard_makes_every_ratio_doubtful_but_not_the_other_times(make_result):
    _, flat = compare_results([few(make_result(median=10.0)), make_result(method="flat", median=25.0)])
    assert (flat.time_doubt, flat.ratio_doubt) == ("", FEW)


def test_two_sweeps_side_by_side_carry_the_doubt(make_result):
    before = [make_result(median=10.0), make_result(method="flat", median=25.0)]
    now = [make_result(median=10.0), few(make_result(method="flat", median=0.5))]
    found = set_against(Report.of(now), Report.of(before), names=("now", "before"))
    text = render_plain(against_summary(found))
    assert "0.5 ms?" in text and "0.05×?" in text and "25.0 ms?" not in text
    assert explain([FEW]) in " ".join(text.split())
    flat = found.to_pandas().iloc[1]
    assert (flat["time_doubt_now"], flat["time_ratio_doubt_now"], flat["time_verdict"]) == (FEW, FEW, FEW)
    assert "0.05×?" in found.pairs[1].changes["time_ratio"].shown[1]


@pytest.fixture
def traced(make_result):
    """Standard and flat, traced, with unprofiled steps as long as given."""

    def make(unprofiled_ms):
        traces = {
            "standard": make_trace([operator("aten::mm", "forward", 100.0)]),
            "flat": make_trace([operator("aten::mm", "clip", 400.0)]),
        }
        results = []
        for method, trace in traces.items():
            timed = make_result(method=method, median=unprofiled_ms * trace["step_ms"])
            looked = make_result(method=method, instrument="trace")
            results += [timed, replace(looked, timing={}, memory={}, avg_time_ms=None, trace=trace)]
        return results

    return make


def test_a_traced_step_ten_times_the_unprofiled_one_is_not_compared_in_earnest(traced):
    results = traced(0.1)
    text = render_plain(summary(Report.of(results)))
    assert "? The profiler makes a step much longer (standard 10.00×, flat 10.00× the unprofiled one)" in text
    line = next(line for line in text.splitlines() if line.startswith("flat against standard"))
    assert " ms? a traced step" in line
    rows = compare_results(results)
    for chart in (phases(rows), operators(rows)):
        said = chart.views[0].says
        assert "10.00×" in said and "what grows most" not in said and "grows most" not in said


def test_a_traced_step_about_as_long_as_the_unprofiled_one_is_compared(traced):
    results = traced(0.9)
    text = render_plain(summary(Report.of(results)))
    assert "The profiler makes" not in text and "ms? a traced step" not in text
    assert "what grows most" in operators(compare_results(results)).views[0].says


def test_rates_stand_beside_times_and_tokens_need_a_sequence(make_result):
    (row,) = compare_results([make_result(median=10.0, batch_size=4, seq_len=16)])
    assert row.speeds == {"samples/s": 400.0, "tokens/s": 6400.0}
    (logical,) = compare_results([make_result(median=10.0, batch_size=4, seq_len=16, accumulate=3)])
    assert logical.speeds == {"samples/s": 1200.0, "tokens/s": 19200.0}
    image = make_result(median=10.0, batch_size=4)
    (image,) = compare_results([replace(image, spec={**image.spec, "seq_len": None})])
    assert image.speeds == {"samples/s": 400.0}
    assert [name for name, _ in make_table(report_of([image])).columns if name.endswith("/s")] == ["samples/s"]
    record = to_records([row])[0]
    assert (record["samples_per_second"], record["tokens_per_second"]) == (400.0, 6400.0)
    assert json.loads(json.dumps(record)) == record
    assert (
        "6,400 tokens/s"
        in make_cards(report_of([row]).sizes[0], report_of([row]).stories[0])[0]["figures"][0]["absolute"]
    )


def test_a_table_shows_peaks_of_one_definition(make_result, make_memory_result):
    """flat ran out of memory under the tracker: its only peak is the allocator's, and so all peaks shown are."""
    timed = [make_result(method=method, peak=peak) for method, peak in (("standard", 2**30), ("flat", 3 * 2**30))]
    failed = make_result(method="flat", status="oom", instrument="memory")
    rows = compare_results([timed[0], make_memory_result("standard"), timed[1], failed])
    assert [row.peak_source for row in rows] == ["cpu_allocator"] * 2
    assert rows[1].memory_ratio == 3.0
    text = render_plain(summary(Report.of([timed[0], make_memory_result("standard"), timed[1], failed])))
    assert text.count("Peak memory:") == 1
    both = compare_results([timed[0], make_memory_result("standard"), timed[1], make_memory_result("flat")])
    assert [row.peak_source for row in both] == ["tracker"] * 2


def test_two_sweeps_show_peaks_of_one_definition(make_result, make_memory_result):
    timed = [make_result(method=method, peak=2**30) for method in ("standard", "flat")]
    before = [*timed, make_memory_result("standard")]
    now = [*timed, make_memory_result("standard"), make_memory_result("flat")]
    found = set_against(Report.of(now), Report.of(before), names=("now", "before"))
    sources = {reading.source for pair in found.pairs for reading in _readings(pair.changes["memory"])}
    assert sources == {"cpu_allocator"}
    assert render_plain(against_summary(found)).count("Peak memory:") == 1


def _readings(change):
    return change.before, change.now
