"""Result files that exist can be read; one that was damaged anywhere is refused in a sentence, or reported on."""

from __future__ import annotations

import json

import pytest

from dpscope.reports.outputs import write_reports
from dpscope.reports.report import Report
from dpscope.results.schema import UnreadableResult, parse_result
from tests import ROOT
from tests.unit.results.damage import damaged, places_in, shortened

COMMITTED = sorted((ROOT / "benchmarks" / "results").rglob("results/*.json"))
PAGE = ROOT / "benchmarks" / "results" / "2026-11-15-h200-page" / "results"
DAMAGE = (None, "text", [], {}, True, float("nan"))

# Instrument -> the parts of its files whose shapes are declared.
PARTS = {"time": ("timing", "memory"), "memory": ("memory", "breakdown", "snapshots", "timeline")}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.parent.name}/{path.stem}")
def test_every_committed_result_can_be_read(path):
    assert parse_result(path.read_text(encoding="utf-8")).experiment


@pytest.mark.slow
@pytest.mark.parametrize(("instrument", "part"), [(name, part) for name, parts in PARTS.items() for part in parts])
def test_a_value_of_the_wrong_kind_anywhere_is_refused_by_its_place_or_makes_no_difference(instrument, part, tmp_path):
    (path,) = PAGE.glob(f"flat_*-{instrument}-*.json")
    document = shortened(json.loads(path.read_text(encoding="utf-8")))
    refused = 0
    for place in places_in(document[part], (part,)):
        for value in DAMAGE:
            try:
                result = parse_result(json.dumps(damaged(document, place, value)))
            except UnreadableResult as refusal:
                assert part in str(refusal)
                refused += 1
            else:
                write_reports(Report.of([result]), tmp_path, formats=())
    assert refused
