"""`dpscope report DIR --against DIR_B`, and what `report` shows on a real terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from dataclasses import replace

import pytest

from dpscope.comparison import Comparison
from dpscope.reports.outputs import remove_reports
from tests.unit.commands.reporting import names_in, report

DPSCOPE = [sys.executable, "-m", "dpscope"]


def save(results, folder):
    (folder / "results").mkdir(parents=True)
    for number, result in enumerate(results):
        (folder / "results" / f"{number}.json").write_text(result.to_json())
    return folder


@pytest.fixture
def sweeps(make_result, tmp_path):
    """Two folders: flat is twice as fast now."""

    def make(method, median):
        result = make_result(method=method, median=median)
        return replace(result, timing=result.timing | {"step_ms": [median] * 5})

    before = save([make("standard", 10.0), make("flat", 40.0)], tmp_path / "old")
    return save([make("standard", 10.0), make("flat", 20.0)], tmp_path / "new"), before


def test_what_changed_is_said_and_every_file_is_named(sweeps):
    now, before = sweeps
    outcome = report(now, "--against", before, "--csv")
    assert outcome.exit_code == 0
    assert "Faster: flat at batch 2, sequence 8 (40.0 ms → 20.0 ms, −50.0%; 4.00× → 2.00× of" in outcome.stdout
    assert f"before: {before}\nnow:    {now}\n" in outcome.stdout
    files = ["against.txt", "report-against.html", "against.csv"]
    assert outcome.stdout.endswith(
        "Written:\n" + "".join(f"  {now / name}\n" for name in files) + f"\nOpen: {now / 'report-against.html'}\n"
    )
    assert names_in(now) == sorted(files)
    assert names_in(before) == []
    assert (now / "against.txt").read_text().startswith("Two sweeps side by side\n")


def test_the_reports_of_each_sweep_stay_as_they_are(sweeps):
    now, before = sweeps
    report(now)
    own = {path: path.read_bytes() for path in now.iterdir() if path.is_file()}
    report(now, "--against", before)
    assert own == {path: path.read_bytes() for path in own}


def test_another_folder_can_be_written_to(sweeps, tmp_path):
    now, before = sweeps
    assert report(now, "--against", before, "--out", tmp_path / "out").exit_code == 0
    assert names_in(tmp_path / "out") == ["against.txt", "report-against.html"]
    assert names_in(now) == []


def test_a_folder_against_itself(sweeps):
    outcome = report(sweeps[0], "--against", sweeps[0])
    assert outcome.exit_code == 0
    assert "Nothing changed in 2 rows compared." in outcome.stdout


@pytest.mark.parametrize("option", [["--latex"], ["--format", "png"]])
def test_what_is_made_of_one_sweep_cannot_be_asked_of_two(sweeps, option):
    outcome = report(sweeps[0], "--against", sweeps[1], *option)
    assert outcome.exit_code == 2
    assert "leave them out, or leave out --against" in outcome.stderr


def test_a_folder_that_is_not_there_and_rows_that_have_nothing_in_common(sweeps, make_result, tmp_path):
    outcome = report(sweeps[0], "--against", tmp_path / "nowhere")
    assert (outcome.exit_code, "nowhere is not a folder" in outcome.stderr) == (2, True)
    other = save([make_result(batch_size=64)], tmp_path / "other")
    outcome = report(sweeps[0], "--against", other)
    assert outcome.exit_code == 2
    assert "have no row in common" in outcome.stderr
    assert "standard, flat on tiny at batch 2" in outcome.stderr
    assert "standard on tiny at batch 64" in outcome.stderr


def test_somebody_elses_text_is_not_replaced(sweeps):
    now, before = sweeps
    (now / "against.txt").write_text("my notes")
    outcome = report(now, "--against", before)
    assert "Nothing written: " in outcome.stdout
    remove_reports(now)
    assert (now / "against.txt").read_text() == "my notes"


def test_a_sweep_that_replaces_another_leaves_none_of_these_files(sweeps):
    now, before = sweeps
    report(now, "--against", before, "--csv")
    remove_reports(now)
    assert names_in(now) == []


def test_broken_files_of_either_are_named(sweeps):
    now, before = sweeps
    (before / "results" / "cut.json").write_text("{")
    outcome = report(now, "--against", before)
    assert "cut.json: not complete JSON" in " ".join(outcome.stdout.split())


def test_the_same_from_python(sweeps):
    now, before = sweeps
    against = Comparison.read(now).against(before)
    assert [pair.changes["time"].verdict for pair in against.pairs] == ["the same", "faster"]
    assert str(Comparison.read(now).against(Comparison.read(before))) == str(against)


def test_help_says_which_folder_is_before():
    text = " ".join(report("--help").stdout.split())
    assert "what changed from the sweep in DIR_B (before) to the one in DIR (now)" in text


def on_a_terminal(*arguments, width, **environment):
    """What a command prints to a real terminal of that width."""
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(width), **environment}
    for name in {"NO_COLOR", "FORCE_COLOR"} - environment.keys():
        env.pop(name, None)
    process = subprocess.Popen([*DPSCOPE, *map(str, arguments)], stdout=follower, stderr=follower, env=env)
    os.close(follower)
    parts = []
    try:
        while part := os.read(leader, 65536):
            parts.append(part)
    except OSError:  # how Linux says that the other end was closed
        pass
    os.close(leader)
    assert process.wait() == 0
    return b"".join(parts)


@pytest.mark.slow
def test_a_real_terminal_shows_bars_and_the_page_and_a_pipe_plain_text(sweeps):
    now = sweeps[0]
    wide = on_a_terminal("report", now, width=120).decode()
    assert "▒▒▒▒▒\x1b[0m\x1b[36m█████" in wide
    assert f"Open: {now / 'report.html'}" in wide
    piped = subprocess.run([*DPSCOPE, "report", str(now)], check=True, capture_output=True).stdout.decode()
    assert "▒" not in piped
    assert "\x1b" not in piped
    assert piped.endswith(f"\nOpen: {now / 'report.html'}\n")


def test_a_terminal_that_is_not_in_unicode_gets_words_it_can_show(sweeps):
    text = on_a_terminal("report", sweeps[0], width=80, PYTHONIOENCODING="ascii", NO_COLOR="1").decode("ascii")
    assert "2.00x  -----#####" in text
    assert "2.00×" in (sweeps[0] / "summary.txt").read_text()


def test_a_pipeline_can_fail_on_what_got_slower(sweeps):
    faster, slower = sweeps
    outcome = report(slower, "--against", faster, "--fail-on", "slower,larger,status")
    assert outcome.exit_code == 1
    assert "Failed: flat at batch 2, sequence 8 is slower" in outcome.stdout
    assert report(faster, "--against", slower, "--fail-on", "slower").exit_code == 0
    assert "--against" in report(faster, "--fail-on", "slower").output
    assert "choose from" in report(faster, "--against", slower, "--fail-on", "worse").output
