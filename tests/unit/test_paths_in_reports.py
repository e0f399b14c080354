"""Paths in files that are shared say nothing of whose machine it was."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpscope.comparison import Comparison
from dpscope.places import path_from, shorten_path
from dpscope.reports.outputs import write_against, write_reports
from dpscope.reports.report import Report
from dpscope.workloads.configs import workload_at

WORKLOAD = "def build(batch_size, seq_len=None):\n    raise NotImplementedError\n"


@pytest.fixture
def alice(monkeypatch, tmp_path):
    home = tmp_path / "alice"
    (home / "project").mkdir(parents=True)
    monkeypatch.setattr(Path, "home", lambda: home)
    return home


def test_lines_of_code_name_no_home(alice, monkeypatch, tmp_path):
    work = alice / "project"
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "path", [])
    shorten_path.cache_clear()
    assert shorten_path(str(work / "models" / "net.py")) == "models/net.py"
    assert shorten_path(str(alice / "elsewhere" / "net.py")) == "net.py"
    assert shorten_path(torch.__file__) == "torch/__init__.py"
    assert shorten_path("<string>") == "<string>"
    monkeypatch.chdir(tmp_path)  # above the home: its name would be a part of the path
    shorten_path.cache_clear()
    assert shorten_path(str(work / "net.py")) == "net.py"
    shorten_path.cache_clear()


@pytest.mark.parametrize(
    ("folder", "file", "told"),
    [
        ("alice/project/sweep", "alice/project/model.py", "../model.py"),
        ("alice/project", "alice/project/models/net.py", "models/net.py"),
        ("alice/sweep", "alice/project/model.py", "../project/model.py"),
        ("scratch/sweep", "alice/project/model.py", "~/project/model.py"),
        ("scratch/sweep", "scratch/model.py", "../model.py"),
    ],
)
def test_a_file_is_told_from_the_folder_or_from_ones_home(folder, file, told, alice, tmp_path):
    assert path_from(tmp_path / folder, str(tmp_path / file)) == told


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("/home/bob/project/model.py", "model.py"),
        ("/Users/bob/model.py", "model.py"),
        (str(Path("/", "root", "model.py")), "model.py"),
        ("/opt/models/model.py", "/opt/models/model.py"),
        ("../model.py", "../model.py"),
    ],
)
def test_somebody_elses_home_is_not_told(file, told, alice):
    assert path_from(alice / "sweep", file) == told
    assert path_from(Path("/home/carol/sweep"), file) == told


@pytest.mark.slow
def test_no_report_names_the_home_of_a_workloads_file(alice, make_result, tmp_path):
    """Two files of one name, so that reports have to tell them apart."""
    results = []
    for place in ("project", "other"):
        file = alice / place / "model.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(WORKLOAD)
        results += [
            make_result(workload=workload_at(f"{file}:build"), seq_len=None, method=method)
            for method in ("standard", "flash")
        ]
        failed = make_result(workload=workload_at(f"{file}:build"), seq_len=None, method="ghost", status="failed")
        results.append(replace(failed, details=f'Traceback:\n  File "{file}", line 2, in build\nKeyError: 1'))
    for out in (alice / "sweep", tmp_path / "scratch"):
        out.mkdir()
        comparison = Comparison(results, out, [], [])
        files = [
            *write_reports(Report.of(results), out, formats=["svg"], wishes=["csv", "latex"]),
            *write_against(comparison.against(comparison), out, wishes=["csv"]),
        ]
        texts = {path.name: path.read_text(encoding="utf-8") for path in files}
        assert re.search(r'File "(~|\.\.)/project/model.py", line 2, in build', texts["summary.txt"])
        for name, text in {**texts, "terminal": str(comparison)}.items():
            told = text.replace(str(out), "")  # the folders that were asked for by that name
            assert str(alice) not in told, name
