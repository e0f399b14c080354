"""`dpscope trace` from the command line to Perfetto's files and a real TensorBoard."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.parse
import urllib.request

import pytest
from click.testing import CliRunner

from dpscope.cli import main
from dpscope.reports.report import compare_results
from dpscope.reports.trace.data import differences, traced_steps
from dpscope.results.store import ResultStore
from tests import rows_here

METHODS = ("standard", "flat", "ghost")
QUIET = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def sweep(tmp_path_factory, tiny_flags):
    """`dpscope trace` of three methods: how it ended, its results and its log."""
    folder = tmp_path_factory.mktemp("trace")
    places = ["--out", str(folder / "out"), "--logdir", str(folder / "runs")]
    done = rows_here.run("trace", "--methods", ",".join(METHODS), *tiny_flags, "--batch-size", "2", *places)
    return done, folder / "out", folder / "runs"


@pytest.fixture(scope="session")
def rows(sweep):
    found, _ = ResultStore(sweep[1]).read_all()
    return sorted(compare_results(found.values()), key=lambda row: METHODS.index(row.method))


def test_every_method_is_timed_and_traced_and_all_is_well(sweep, rows):
    done, _, _ = sweep
    assert done.exit_code == 0, done.output
    assert [(row.method, set(row.measured)) for row in rows] == [(method, {"time", "trace"}) for method in METHODS]


def test_phase_times_sum_to_the_step_time(rows):
    for row in rows:
        trace = row.measured["trace"].trace
        phases = {part["phase"]: part["cpu_ms"] for part in trace["phases"]}
        assert sum(phases.values()) == pytest.approx(trace["step_ms"], rel=0.02)
        named = {"forward", "backward", "optimizer"} | ({"clip", "noise"} if row.method != "standard" else set())
        assert {*named, "between phases"} == set(phases)


def test_the_difference_to_standard_sums_to_the_difference_of_the_traced_steps(rows):
    steps = {row.method: row.measured["trace"].trace["step_ms"] for row in rows}
    found = differences(traced_steps(rows))
    assert [each.method for each in found] == ["flat", "ghost"]
    for each in found:
        measured = steps[each.method] - steps["standard"]
        assert sum(change.ms for change in each.changes) == pytest.approx(measured, abs=1e-6)
        assert any(change.kind == "new" and change.phase == "noise" for change in each.changes)


def test_time_under_the_profiler_is_never_step_time(rows):
    for row in rows:
        assert row.median_ms == row.measured["time"].timing["median_ms"]
        assert row.measured["trace"].timing == {}
        assert row.measured["trace"].avg_time_ms is None


def test_traces_are_named_and_their_size_is_said(sweep, rows):
    done, folder, _ = sweep
    for row in rows:
        (name,) = row.measured["trace"].files.values()
        assert (folder / name).stat().st_size == row.measured["trace"].trace["files"]["trace.json.gz"] < 20 * 2**20
        assert str(folder / name) in done.stdout.partition("Written:")[2]
    assert re.search(r"\[2/6\] standard tiny bs2 seq8 fp32 trace: 2 steps traced, [\d.]+ (KiB|MiB)", done.stdout)


def test_figures_are_written_and_named(sweep):
    done, folder, _ = sweep
    for name in ("trace_phases.png", "trace_differences.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert name in done.stdout.partition("Written:")[2]


def test_report_shows_the_same_again(sweep):
    _, folder, _ = sweep
    report = rows_here.run("report", folder)
    assert "Where the time goes (batch 2, sequence 8)" in report.stdout
    assert "ghost against standard" in report.stdout


def test_traces_lie_where_the_profiler_tab_would_look(sweep):
    _, _, logdir = sweep
    assert sorted(path.name for path in logdir.rglob("*.pt.trace.json.gz")) == [
        "flat.0.pt.trace.json.gz",
        "ghost.0.pt.trace.json.gz",
        "standard.0.pt.trace.json.gz",
    ]


@pytest.fixture(scope="session")
def board(sweep):
    """A real TensorBoard on loopback; asks it for JSON or bytes."""
    pytest.importorskip("tensorboard")
    _, _, logdir = sweep
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--load_fast=false", "--reload_interval=1"], stderr=subprocess.PIPE, text=True, env=QUIET
    )
    address = None
    for line in process.stderr:
        if match := re.search(r"http://127\.0\.0\.1:\d+", line):
            address = match.group()
            break
    assert address, "TensorBoard did not start"

    def ask(path, **query):
        with urllib.request.urlopen(f"{address}/{path}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
            body = answer.read()
            return json.loads(body) if "json" in answer.headers["Content-Type"] else body

    yield ask
    process.kill()
    process.wait()
    process.stderr.close()


RUN = "out/tiny_bs2_seq8_fp32"


def loaded(board, plugin, wait_until):
    """The tags of a plugin, once TensorBoard has read all runs."""
    wait_until(lambda: len(board(f"data/plugin/{plugin}/tags")) > 0, f"TensorBoard has {plugin}", pause=0.2)
    return board(f"data/plugin/{plugin}/tags")


def test_tensorboard_serves_step_times_phases_and_peak_memory(board, rows, wait_until):
    wait_until(lambda: f"{RUN}/ghost" in board("data/plugin/scalars/tags"), "all runs are read", pause=0.2)
    tags = board("data/plugin/scalars/tags")
    for row in rows:
        run = f"{RUN}/{row.method}"
        assert {"step_ms/unprofiled", "step_ms/traced", "phase_host_ms/backward", "memory/peak_mib"} <= set(tags[run])
        (series,) = [board("data/plugin/scalars/scalars", run=run, tag="step_ms/unprofiled")]
        assert [value for _, _, value in series] == pytest.approx(row.timing["step_ms"], rel=1e-6)


def test_tensorboard_serves_the_tables_as_text(board, wait_until):
    tags = loaded(board, "text", wait_until)
    assert {"trace/phases", "trace/operators"} <= {tag.removesuffix("/text_summary") for tag in tags[f"{RUN}/flat"]}
    (difference,) = [tag for tag in tags[f"{RUN}/comparison"] if tag.startswith("difference/ghost")]
    (text,) = board("data/plugin/text/text", run=f"{RUN}/comparison", tag=difference)
    assert "<table>" in text["text"]
    assert "the whole step" in text["text"]


def test_tensorboard_serves_the_figures_as_images(board, wait_until):
    tags = loaded(board, "images", wait_until)
    (tag,) = [tag for tag in tags[f"{RUN}/comparison"] if tag.startswith("trace_phases")]
    (image,) = board("data/plugin/images/images", run=f"{RUN}/comparison", tag=tag, sample=0)
    picture = board(f"data/plugin/images/individualImage?{image['query']}&")
    assert picture.startswith(b"\x89PNG")


def test_tensorboards_page_comes_from_this_machine(board):
    assert b"<html" in board("").lower()


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(main, ["trace", *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--schedule", "often"], "short"),
        (["--trace-steps", "0"], "0 is not in the range"),
        (["--methods", "magic"], "unknown method 'magic'"),
    ],
)
def test_a_mistake_gets_a_sentence_and_nothing_is_measured(run, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = run("--device", "cpu", *arguments)
    assert outcome.exit_code == 2
    assert words in outcome.output
    assert list(tmp_path.iterdir()) == []


def test_a_log_folder_that_is_a_file_is_refused_before_anything_is_measured(run, tmp_path, tiny_flags):
    (tmp_path / "runs").write_text("mine")
    outcome = run(*tiny_flags, "--out", str(tmp_path / "out"), "--logdir", str(tmp_path / "runs"))
    assert outcome.exit_code == 2
    assert "is a file, not a folder: choose another --logdir" in outcome.output
    assert not (tmp_path / "out").exists()


def test_without_tensorboard_everything_else_is_there_and_a_sentence_says_so(rows, tmp_path, monkeypatch):
    from dpscope.commands.trace import write_log
    from dpscope.errors import UserError

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"pip install tensorboard$"):
        write_log(rows, tmp_path, tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_a_log_replaces_one_of_the_same_name(sweep, rows, tmp_path):
    from dpscope.commands.trace import write_log

    _, folder, _ = sweep
    first = write_log(rows, folder, tmp_path)
    files = {path.relative_to(first).parent for path in first.rglob("events.out.*")}
    second = write_log(rows, folder, tmp_path)
    assert first == second
    assert len(list(second.rglob("events.out.*"))) == len(files) == 4
