"""A real comparison from the command line to the files it leaves, and the same shown again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpscope.commands.compare import _next_steps
from dpscope.reports.report import compare_results
from dpscope.results.store import ResultStore
from dpscope.runner.spec import RunSpec
from dpscope.workloads.configs import make_config

DPSCOPE = str(Path(sys.executable).with_name("dpscope"))


@pytest.fixture(scope="module")
def comparison(tmp_path_factory, tiny_flags):
    """`dpscope compare` of two methods: the finished process and its folder."""
    folder = tmp_path_factory.mktemp("compare") / "out"
    command = [DPSCOPE, "compare", "--methods", "flat,vanilla", *tiny_flags, "--batch-size", "2", "--out", str(folder)]
    command[command.index("--steps") + 1] = "3"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False), folder


def lines_of(text):
    return [line.rstrip() for line in text.splitlines()]


def without_stages(summary):
    """The file's lines without the table of stages, which is for the file alone."""
    lines = lines_of(summary.read_text())
    stages = next(number for number, line in enumerate(lines) if line.startswith("Allocated at each stage"))
    return lines[: stages - 1]


def test_every_row_is_ok_and_so_is_the_exit_code(comparison):
    process, folder = comparison
    assert process.returncode == 0, process.stderr
    assert len(list((folder / "results").glob("*-time-*.json"))) == 2
    assert len(list((folder / "results").glob("*-memory-*.json"))) == 2


def test_the_table_has_absolute_figures_and_ratios_with_standard_first(comparison):
    process, _ = comparison
    figures = r"\s+2\s+8\s+[\d.]+ m?s\?\s+[\d.]+–[\d.]+(?:\s+[\d.,]+\?){2}\s+([\d.]+)×\?\s+[\d.]+ MiB\s+([\d.]+)×\s+ok$"
    rows = [line for line in lines_of(process.stdout) if re.match(r"(standard|flat) +2 ", line)]
    standard, flat = (re.search(figures, row) for row in rows)
    assert rows[0].startswith("standard")
    assert standard.groups() == ("1.00", "1.00")
    assert float(flat.group(2)) > 1  # per-sample gradients take memory


def test_progress_into_a_pipe_is_one_plain_line_a_row(comparison):
    process, _ = comparison
    lines = lines_of(process.stdout)
    timed = r"\[1/4\] standard tiny bs2 seq8 fp32 time: [\d.]+ ms a step, peak [\d.]+ MiB \([a-z ]+? .* left\)"
    assert re.fullmatch(timed, lines[0])
    assert re.fullmatch(r"\[2/4\] standard tiny bs2 seq8 fp32 memory: peak [\d.]+ MiB \([a-z ]+? .* left\)", lines[1])
    assert lines[2].startswith("[3/4] flat tiny bs2 seq8 fp32 time: ") and lines[2].endswith(" left)")
    assert re.fullmatch(r"\[4/4\] flat tiny bs2 seq8 fp32 memory: peak [\d.]+ MiB", lines[3])


def test_what_goes_into_a_pipe_is_plain(comparison):
    process, folder = comparison
    assert "\x1b" not in process.stdout + process.stderr + (folder / "summary.txt").read_text()


def test_the_summary_file_is_what_was_printed(comparison):
    process, folder = comparison
    summary = without_stages(folder / "summary.txt")
    assert "\n".join(summary) in "\n".join(lines_of(process.stdout))
    assert any(line.startswith("flat ") for line in summary)


def test_components_are_in_the_table_and_add_up_to_the_peak_of_the_row(comparison):
    """The memory instrument's peak is the row's, although the time instrument has one too."""
    process, folder = comparison
    assert re.search(r"^per-sample gradients \*\s+—\s+[\d.]+ [KM]iB$", process.stdout, flags=re.MULTILINE)
    results, _ = ResultStore(folder).read_all()
    for row in compare_results(results.values()):
        assert set(row.measured) == {"time", "memory"}
        assert row.memory["source"] == "tracker"
        assert row.peak_bytes == sum(row.memory["peak"]["components"].values())
        assert row.median_ms == row.measured["time"].timing["median_ms"]


def test_every_file_written_is_named_in_the_last_lines(comparison):
    process, folder = comparison
    named = process.stdout.partition("Written:")[2]
    for path in (folder / "summary.txt", *(folder / "results").iterdir()):
        assert str(path) in named
        assert path.exists()


def test_a_result_file_has_the_keys_of_old_and_everything_new(comparison):
    _, folder = comparison
    (path,) = (folder / "results").glob("flat*-time-*.json")
    document = json.loads(path.read_text())
    assert document["experiment"] == "flat"
    assert document["config"]["hidden_dim"] == 16
    assert document["config"]["model"] == "tiny"
    assert document["config"]["batch_size"] == 2
    assert {"breakdown", "snapshots"} <= set(document)
    assert document["status"] == "ok"
    assert document["reason"] is None
    timing = document["timing"]
    assert len(timing["step_ms"]) == 3
    assert all(step > 0 for step in timing["step_ms"])
    assert timing["median_ms"] == sorted(timing["step_ms"])[1]
    assert timing["p10_ms"] <= timing["median_ms"] <= timing["p90_ms"]
    assert document["avg_time_ms"] == pytest.approx(sum(timing["step_ms"]) / 3)
    assert document["peak_memory_mb"] == document["memory"]["peak_bytes"] / 2**20 > 0
    assert document["spec"]["method"] == "flat"


def test_a_result_file_says_what_it_was_measured_on(comparison):
    import torch

    import dpscope

    _, folder = comparison
    for path in (folder / "results").iterdir():
        environment = json.loads(path.read_text())["environment"]
        assert environment["torch"] == torch.__version__
        assert environment["dpscope"] == dpscope.__version__
        assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
        assert environment["threads"] == 1
        assert environment["gpu"] is None
        assert environment["cpu"]
        assert "git_commit" in environment


def test_the_peak_of_the_standard_row_holds_the_model_twice_and_its_optimizer(comparison):
    """At the least: parameters, gradients and AdamW's two moments, four bytes each."""
    from dpscope.workloads.built_in import SimpleBigModel
    from dpscope.workloads.configs import make_config

    _, folder = comparison
    (path,) = (folder / "results").glob("standard*-time-*.json")
    config = make_config("tiny", num_layers=1, hidden_dim=16, num_heads=2, vocab_size=50, max_seq_len=32)
    parameters = sum(p.numel() for p in SimpleBigModel(config).parameters())
    assert json.loads(path.read_text())["memory"]["peak_bytes"] > 4 * 4 * parameters


def test_report_shows_the_same_again_from_the_files_alone(comparison):
    _, folder = comparison
    report = subprocess.run([DPSCOPE, "report", str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert report.returncode == 0
    shown, files = report.stdout.split("\nWritten:\n")
    assert lines_of(shown) == without_stages(folder / "summary.txt")
    figures = ("memory_breakdown_comparison.png", "memory_timeline.png", "performance_tradeoff.png")
    page = str(folder / "report.html")
    findings = [str(folder / name) for name in ("findings.json", "findings.md")]
    written = [str(folder / "summary.txt"), page, *findings, *(str(folder / name) for name in figures)]
    assert files.split() == [*written, "Open:", page]


def test_report_names_files_that_are_no_results_and_goes_on(comparison, tmp_path):
    _, folder = comparison
    for path in (folder / "results").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "cut.json").write_text('{"schema_version": 1, "exper')
    (tmp_path / "package.json").write_text("{}")
    report = subprocess.run([DPSCOPE, "report", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert report.returncode == 1  # a pipeline is told
    assert "Left out: cut.json: not complete JSON" in report.stdout
    assert "Left out: package.json: not a dpscope result" in report.stdout
    assert any(line.startswith("flat ") for line in report.stdout.splitlines())


@pytest.mark.parametrize(("model", "takes_a_length"), [("cnn", False), ("tiny", True)])
def test_what_to_try_next_are_options_that_the_model_takes(model, takes_a_length):
    spec = RunSpec(workload=make_config(model), method="standard", batch_size=3)
    (sizes,) = (part for part in _next_steps(spec, whole=False).split("; ") if "--batch-size" in part)
    assert "--batch-size 3,6" in sizes
    assert ("--seq-len 128,256" in sizes) == takes_a_length
    assert "--all" in _next_steps(spec, whole=False)
    assert "--all" not in _next_steps(spec, whole=True)
