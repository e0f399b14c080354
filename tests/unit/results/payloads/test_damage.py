"""Damage deep inside a result is refused, and never ends a report in a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpscope.reports.export import TRACE_CSV, TRAFFIC_CSV
from dpscope.reports.page.render import make_charts
from dpscope.reports.report import Report
from dpscope.reports.text import summary
from dpscope.results.schema import UnreadableResult, parse_result
from tests import ROOT
from tests.unit.results.damage import GONE, damaged, places_in, shortened

RESULTS = ROOT / "benchmarks" / "results"
DAMAGES = (None, "text", [], {}, True, 0, -1.5, 1e299, GONE)


def tell(results):
    """Every figure that a report shows, but in pictures; laying tables out would take ten times as long."""
    report = Report.of(results)
    summary(report, detailed=True)
    make_charts(report.settings)
    for output in (*TRACE_CSV, *TRAFFIC_CSV):
        output.write(report, Path(), ())


@pytest.fixture(scope="module")
def documents():
    """Instrument -> the results of standard and flash at one size, as JSON."""
    folders = {"trace": "h200-traces", "nsys": "h200-traces", "ncu": "h200-traffic", "time": "h200-traces"}

    def read(method, instrument):
        (path,) = RESULTS.glob(f"*-{folders[instrument]}/results/{method}_1b_bs8_seq1024_bf16-{instrument}-*.json")
        return shortened(json.loads(path.read_text(encoding="utf-8")))

    return {name: [read(method, name) for method in ("standard", "flash")] for name in folders}


@pytest.mark.slow
@pytest.mark.parametrize("instrument", ["trace", "nsys", "ncu"])
def test_whatever_is_damaged_in_a_payload_it_is_refused_or_reported(documents, instrument, monkeypatch):
    monkeypatch.setattr("dpscope.reports.output.write_atomically", lambda path, text: None)
    times = [parse_result(json.dumps(document)) for document in documents["time"]]
    reported = refused = 0
    for document, other in (documents[instrument], reversed(documents[instrument])):
        rest = [parse_result(json.dumps(other)), *times]
        for place in list(places_in(document[instrument]))[1:]:
            for damage in DAMAGES:
                text = json.dumps(damaged(document, (instrument, *place), damage))
                try:
                    result = parse_result(text)
                except UnreadableResult as error:
                    assert f"({instrument}" in str(error)
                    refused += 1
                else:
                    try:
                        tell([result, *rest])
                    except Exception as error:
                        raise AssertionError(f"{place} with {damage!r}") from error
                    reported += 1
    assert refused > 100 and reported > 100
