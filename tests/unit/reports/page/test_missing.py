"""What a page says it cannot show: why, and what to type."""

from __future__ import annotations

from pathlib import Path

from dpscope.reports.page.render import find_missing
from dpscope.reports.report import Report
from dpscope.results.store import Skipped
from dpscope.vocabulary.instruments import INSTRUMENTS
from tests.unit.reports.traffic_results import results_for

SHOWS = {name: each.shows for name, each in INSTRUMENTS.items()}
ESTIMATED = " (≈ estimate: on a CPU nothing counts bytes)"


def gaps_of(*results):
    return {gap.what: gap for gap in find_missing(Report.of(results)).gaps}


def test_every_instrument_that_did_not_look_is_named_with_its_command(make_result):
    gaps = gaps_of(make_result(), make_result(method="flat"))
    assert list(gaps) == [SHOWS["memory"], SHOWS["trace"], SHOWS["ncu"] + ESTIMATED]  # nsys has no GPU to look at
    assert gaps[SHOWS["trace"]].commands[0].startswith("dpscope compare --instruments trace --model tiny ")
    assert gaps[SHOWS["memory"]].commands[0].endswith(" --out . --resume")


def test_a_gap_at_some_sizes_names_them(make_result):
    gaps = gaps_of(make_result(), make_result(instrument="memory"), make_result(batch_size=4))
    assert gaps[SHOWS["memory"]].where == "batch 4, sequence 8"
    assert ["--batch-size 4 " in command for command in gaps[SHOWS["memory"]].commands] == [True]


def test_a_gap_at_some_methods_of_a_size_names_them(make_result):
    seen = [make_result(), make_result(method="flat"), make_result(instrument="memory")]
    assert gaps_of(*seen)[SHOWS["memory"]].where == "batch 2, sequence 8 (flat)"


def test_what_was_measured_is_no_gap():
    gaps = gaps_of(*results_for("standard", "flat"))
    assert SHOWS["ncu"] not in gaps and SHOWS["time"] not in gaps


def test_an_instrument_that_failed_is_a_failure_and_not_a_gap(make_result):
    results = [make_result(), make_result(instrument="memory", status="failed", reason="no tracker")]
    missing = find_missing(Report.of(results))
    assert missing.failed == [("standard", "batch 2, sequence 8", "failed", "no tracker")]
    assert SHOWS["memory"] not in [gap.what for gap in missing.gaps]


def test_files_left_out_are_named_with_the_reason():
    missing = find_missing(Report.of([], [Skipped(Path("results/cut.json"), "not complete JSON")]))
    assert missing.skipped == [("cut.json", "not complete JSON")]
