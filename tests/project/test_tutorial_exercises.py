"""Exercises of the lessons: every stub fails its check with a hint, every solution passes, each section has one."""

from __future__ import annotations

import importlib
import importlib.util
import re
from itertools import pairwise

import pytest

from tests import ROOT

jupytext = pytest.importorskip("jupytext")

TUTORIALS = ROOT / "tutorials"
LESSONS = sorted(TUTORIALS.glob("[0-9][0-9]*-*.py"))
CALLED = re.compile(r'(?:check|passed)\("([\d.]+)", (.+?)\)(?= |\n|$)')


def exercises():
    """Number of an exercise -> the stub's code, and the answers that its check is given."""
    found = {}
    for lesson in LESSONS:
        cells = [cell.source for cell in jupytext.read(lesson).cells if cell.cell_type == "code"]
        for stub, cell in pairwise(cells):
            for number, answers in CALLED.findall(cell):
                found[number] = (stub, answers)
    return found


EXERCISES = exercises()


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(TUTORIALS / "programs"))
    return importlib.import_module("checks").passed


def solutions_of(number, monkeypatch):
    path = TUTORIALS / "solutions" / f"lesson_{number.partition('.')[0]}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ANSWERS


@pytest.mark.parametrize("number", EXERCISES)
def test_a_stub_fails_its_check_and_a_solution_passes(number, check, capsys, monkeypatch):
    stub, answers = EXERCISES[number]
    filled = {}
    exec(stub, filled)
    assert check(number, *eval(f"({answers},)", filled)) is False
    assert f"Exercise {number}: to do" in capsys.readouterr().out
    assert check(number, *solutions_of(number, monkeypatch)[number]) is True
    assert capsys.readouterr().out == f"Exercise {number}: right.\n"


def test_there_is_a_solution_for_each_exercise_and_no_other(monkeypatch, check):
    solved = [n for lesson in range(1, 8) for n in solutions_of(f"{lesson}.0", monkeypatch)]
    assert solved == list(EXERCISES)


def test_sections_end_with_an_exercise():
    without = []
    for lesson in LESSONS:
        sections = re.split(r"^## (?=\d)", lesson.read_text(encoding="utf-8"), flags=re.M)[1:]
        without += [section.split()[0] for section in sections if not CALLED.search(section)]
    # TensorBoard, a private step on the timeline, verdicts, conclusions, what the hunt was worth: nothing to fill in.
    assert without == ["2.10", "3.17", "4.6", "5.10", "7.7"]


def test_wrong_answers_get_a_hint_in_the_language_of_the_lesson(check, capsys):
    language = importlib.import_module("language")
    assert check("1.1", lambda operators, launch, kernel: operators * (launch + kernel)) is False
    assert "You add both times" in capsys.readouterr().out
    language.use("zh")
    try:
        assert check("1.1", lambda operators, launch, kernel: operators * (launch + kernel)) is False
        assert "加起来" in capsys.readouterr().out
    finally:
        language.use("en")


def test_code_that_raises_is_told_and_does_not_stop_the_lesson(check, capsys):
    assert check("1.1", lambda *a: 1 / 0) is False
    assert "your code raised ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize("number", EXERCISES)
def test_a_wrong_answer_does_not_pass(number, check, monkeypatch):
    (solution,) = solutions_of(number, monkeypatch)[number]
    wrong = {str: "wrong", dict: {}, list: [], int: -1}.get(type(solution), lambda *arguments: 0)
    assert check(number, wrong) is False
