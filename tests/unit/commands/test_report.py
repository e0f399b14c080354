"""`dpscope report`: files from results that exist, whatever else lies in the folder."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from dpscope.commands.report import parse_formats
from dpscope.comparison import Comparison
from dpscope.errors import UserError
from dpscope.reports.outputs import remove_reports
from tests import ROOT
from tests.unit.commands.reporting import names_in, report

SCRIPT = ROOT / "scripts" / "visualize_memory_breakdown.py"


def save(results, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for number, result in enumerate(results):
        (folder / f"{number}.json").write_text(result.to_json())
    return folder


@pytest.fixture
def sweep(make_result, tmp_path):
    """A folder of two results, as a sweep leaves it."""
    results = [make_result(), make_result(method="flat", median=25.0)]
    save(results, tmp_path / "sweep" / "results")
    return tmp_path / "sweep"


def test_every_file_is_written_into_the_folder_and_named(measured_both_ways, tmp_path):
    folder = tmp_path / "sweep"
    save(measured_both_ways(), folder / "results")
    outcome = report(folder, "--csv", "--latex")
    assert outcome.exit_code == 0
    files = [
        *(
            "summary.txt",
            "report.html",
            "findings.json",
            "findings.md",
            "memory_breakdown_comparison.png",
            "memory_timeline.png",
            "performance_tradeoff.png",
        ),
        *("results.csv", "timeline.csv", "results.tex"),
    ]
    assert names_in(folder) == sorted(files)
    written, _, last = outcome.stdout.split("Written:\n")[1].partition("\n\n")
    assert [line.strip() for line in written.splitlines()] == [str(folder / name) for name in files]
    assert last == f"Open: {folder / 'report.html'}\n"
    assert "Allocated at each stage" in (folder / "summary.txt").read_text()


def test_another_folder_and_other_formats_can_be_asked_for(sweep, tmp_path):
    assert report(sweep, "--out", tmp_path / "new" / "paper", "--format", "svg,pdf").exit_code == 0
    assert names_in(sweep) == []
    assert names_in(tmp_path / "new" / "paper") == [
        *("findings.json", "findings.md", "performance_tradeoff.pdf", "performance_tradeoff.svg"),
        *("report.html", "summary.txt"),
    ]


def test_a_broken_file_is_named_and_the_rest_is_drawn(sweep):
    (sweep / "results" / "cut.json").write_text('{"schema_version": 1, "exp')
    outcome = report(sweep)
    assert outcome.exit_code == 1
    assert "Left out: cut.json: not complete JSON" in outcome.stdout
    assert (sweep / "performance_tradeoff.png").is_file()
    assert "Left out: cut.json" in (sweep / "summary.txt").read_text()


def test_a_result_whose_spec_lacks_a_part_is_damaged_and_named(sweep, make_result):
    document = json.loads(make_result(method="ghost").to_json())
    del document["spec"]["dtype"]
    (sweep / "results" / "odd.json").write_text(json.dumps(document))
    outcome = report(sweep)
    assert "Left out: odd.json: a damaged dpscope result (spec)" in outcome.stdout


def test_a_bare_folder_of_results_under_their_older_names_is_read(make_memory_result, tmp_path):
    """As single_experiment.py leaves them; an alias for a method is understood."""
    for alias, method in (("vanilla", "standard"), ("ghost", "ghost"), ("flash_clip", "flash")):
        result = replace(make_memory_result(method), experiment=alias)
        (tmp_path / f"{alias}_result.json").write_text(result.to_json())
    comparison = Comparison.read(tmp_path)
    assert [row.method for row in comparison.rows] == ["standard", "ghost", "flash"]
    assert comparison.rows[1].memory_ratio == pytest.approx(937 / 709, abs=1e-5)


def test_a_method_of_a_package_that_is_not_here_keeps_its_name_and_stands_last(make_result, tmp_path):
    save([replace(make_result(), experiment="theirs"), make_result()], tmp_path)
    assert [row.method for row in Comparison.read(tmp_path).rows] == ["standard", "theirs"]


def test_a_folder_that_cannot_be_written_is_still_shown(sweep):
    (sweep / "summary.txt").mkdir()  # stands in for a read-only folder: root may write anywhere
    outcome = report(sweep)
    assert outcome.exit_code == 0
    assert "flat takes 2.50× the time and" in outcome.stdout
    assert "Nothing written: cannot write to" in outcome.stdout
    assert "choose another folder with --out" in outcome.stdout


def test_an_output_folder_that_cannot_be_written_is_an_error(sweep, tmp_path):
    (tmp_path / "file").write_text("")
    outcome = report(sweep, "--out", tmp_path / "file" / "below")
    assert outcome.exit_code == 2
    assert "cannot write to" in outcome.stderr


def test_somebody_elses_summary_is_not_replaced(sweep):
    (sweep / "summary.txt").write_text("my notes")
    outcome = report(sweep, "--csv")
    assert outcome.exit_code == 2
    assert "is there already and is not dpscope's" in outcome.stderr
    assert (sweep / "summary.txt").read_text() == "my notes"


def test_somebody_elses_page_is_neither_replaced_nor_removed(sweep):
    (sweep / "report.html").write_text("<!doctype html><title>My report on dpscope</title>")
    outcome = report(sweep, "--csv")
    assert outcome.exit_code == 2
    assert "report.html is there already and is not dpscope's" in outcome.stderr
    remove_reports(sweep)
    assert "My report" in (sweep / "report.html").read_text()


def test_a_sweep_that_replaces_another_leaves_neither_its_page_nor_its_summary(sweep):
    report(sweep)
    assert {"report.html", "summary.txt"} <= set(names_in(sweep))
    remove_reports(sweep)
    assert names_in(sweep) == []


def test_a_sweep_that_replaces_another_leaves_none_of_its_figures_and_none_of_yours_is_touched(tmp_path):
    old = ["memory_timeline.png", "memory_timeline_bs8_seq1024.pdf", "performance_tradeoff_1b_bs8.svg", "results.csv"]
    old += ["roofline.png", "traffic.csv"]
    yours = ["memory_timeline_for_the_talk.png", "notes.csv", "memory_timeline.txt"]
    for name in (*old, *yours):
        (tmp_path / name).write_text("")
    remove_reports(tmp_path)
    assert names_in(tmp_path) == sorted(yours)


def test_a_format_that_does_not_exist_is_refused_before_anything_is_read(tmp_path):
    outcome = report(tmp_path / "nowhere", "--format", "png,gif")
    assert outcome.exit_code == 2
    assert outcome.stderr.strip() == "Error: no figure format 'gif': choose from png, svg, pdf"


def test_a_row_that_failed_shows_in_the_exit_code(make_result, tmp_path):
    save([make_result(), make_result(method="flat", status="oom")], tmp_path)
    assert report(tmp_path).exit_code == 1


def run_script(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_the_script_of_older_suites_writes_three_figures_and_a_summary(make_memory_result, make_result, tmp_path):
    """Time and memory in one file, as older suites wrote them."""
    for method in ("standard", "ghost"):
        memory, timed = make_memory_result(method), make_result(method=method)
        whole = replace(memory, timing=timed.timing, avg_time_ms=timed.avg_time_ms)
        (tmp_path / f"{method}_result.json").write_text(whole.to_json())
    done = run_script("--input-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert names_in(tmp_path / "visualizations") == [
        *("findings.json", "findings.md", "memory_breakdown_comparison.png", "memory_timeline.png"),
        "performance_tradeoff.png",
        *("report.html", "summary.txt"),
    ]
    assert "ghost holds 228.0 MiB more than standard" in done.stdout


def test_the_script_says_which_figure_there_is_nothing_for(sweep, tmp_path):
    done = run_script("--input-dir", sweep, "--output-dir", tmp_path / "out", "--format", "svg")
    assert done.returncode == 0
    assert "No memory_timeline: no result has what it shows" in done.stdout
    assert names_in(tmp_path / "out") == [
        *("findings.json", "findings.md", "performance_tradeoff.svg", "report.html", "summary.txt")
    ]


def test_the_script_refuses_an_empty_folder_with_a_sentence(tmp_path):
    done = run_script("--input-dir", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Error: no dpscope results in" in done.stderr


@pytest.mark.parametrize(
    ("text", "formats"), [("png", ("png",)), ("png,SVG", ("png", "svg")), (" pdf , .pdf,", ("pdf",))]
)
def test_formats_are_asked_for_with_commas(text, formats):
    assert parse_formats(text) == formats


@pytest.mark.parametrize("text", ["jpeg", "png,gif", "", ","])
def test_a_format_that_does_not_exist_is_refused_with_those_that_do(text):
    with pytest.raises(UserError, match="choose from png, svg, pdf"):
        parse_formats(text)
