"""Every file that reports write is declared, named in the docs, and goes when the results it is of are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpscope.comparison import Comparison
from dpscope.reports.against.data import set_against
from dpscope.reports.outputs import AGAINST_OUTPUTS, OUTPUTS, remove_reports, write_against, write_reports
from dpscope.reports.report import Report

ROOT = Path(__file__).parents[3]
EVERY_INSTRUMENT = ROOT / "benchmarks/results/2026-11-15-h200-page"


@pytest.mark.slow
def test_what_every_writer_writes_is_removed_again(tmp_path):
    comparison = Comparison.read(EVERY_INSTRUMENT)
    written = [
        *write_reports(comparison.report, tmp_path, formats=("png", "svg"), wishes=("csv", "latex")),
        *write_against(comparison.against(comparison), tmp_path, wishes=("csv",)),
    ]
    assert {path.name for path in written} == {path.name for path in tmp_path.iterdir()}
    for output in (*OUTPUTS, *AGAINST_OUTPUTS):
        assert [path for path in written if output.has_name(path.name)] or output.name == "traffic_kernels.csv"
    (tmp_path / "trace_phases_for_the_talk.png").write_text("mine")
    remove_reports(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["trace_phases_for_the_talk.png"]


def test_the_docs_list_every_file_in_its_words():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    for output in (*OUTPUTS, *AGAINST_OUTPUTS):
        name = f"{output.name}.png" if output.figure else output.name
        wish = f" (`--{output.asked_for}`)" if output.asked_for else ""
        assert f"| `{name}`{wish} | {output.holds} |" in page


def test_a_status_that_this_version_does_not_know_is_in_every_output_by_its_name(make_result, tmp_path):
    results = [make_result(), make_result(method="flat", status="preempted"), make_result(method="ghost")]
    report = Report.of(results)
    before = Report.of([*results[:1], make_result(method="flat")])
    written = [
        *write_reports(report, tmp_path, wishes=("csv", "latex")),
        *write_against(set_against(report, before, names=("now", "before")), tmp_path, wishes=("csv",)),
    ]
    texts = [path for path in written if path.suffix != ".png"]
    assert {path.name for path in texts} == {
        *("summary.txt", "report.html", "findings.json", "findings.md", "results.csv", "results.tex"),
        *("against.txt", "report-against.html", "against.csv"),
    }
    assert [path.name for path in texts if "preempted" not in path.read_text()] == []
