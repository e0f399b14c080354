"""Result files that exist open. Damage deep inside one is refused, and never ends a report in a traceback."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest

from dpscope.reports.export import TRACE_CSV, TRAFFIC_CSV
from dpscope.reports.page.render import make_charts
from dpscope.reports.report import Report
from dpscope.reports.text import summary
from dpscope.results.schema import UnreadableResult, parse_result
from tests import ROOT

RESULTS = ROOT / "benchmarks" / "results"
KEPT = 2  # items of each list, enough to damage one of them
GONE = object()
DAMAGES = (None, "text", [], {}, True, 0, -1.5, 1e299, GONE)


def committed_files():
    return sorted(path for path in RESULTS.rglob("*.json") if path.parent.name == "results")


@pytest.mark.parametrize("folder", sorted({path.parents[1] for path in committed_files()}), ids=lambda path: path.name)
def test_every_committed_result_opens(folder):
    files = sorted((folder / "results").glob("*.json"))
    assert [parse_result(path.read_text(encoding="utf-8")).status for path in files]


def shortened(value):
    if isinstance(value, dict):
        return {name: shortened(item) for name, item in value.items()}
    return [shortened(item) for item in value[:KEPT]] if isinstance(value, list) else value


def places_in(value, place=()):
    """Every place within a document, the whole first."""
    yield place
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places_in(item, (*place, key))


def damaged(document, place, damage):
    changed = deepcopy(document)
    *way, last = place
    around = changed
    for key in way:
        around = around[key]
    if damage is GONE:
        del around[last]
    else:
        around[last] = damage
    return changed


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
