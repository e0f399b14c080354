"""Pages and files around the lessons: sheets, traces to download, glossaries, and the table of topics."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re

import pytest

from tests import ROOT

TUTORIALS = ROOT / "tutorials"


@pytest.fixture(scope="module")
def sheets():
    spec = importlib.util.spec_from_file_location("sheets_make", TUTORIALS / "sheets" / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cheat-sheet", "symptoms"])
@pytest.mark.parametrize(("number", "language"), list(enumerate(("en", "zh"))))
def test_a_sheet_is_the_one_its_script_draws_and_fits_its_page(name, number, language, sheets):
    drawn = sheets.SHEETS[name](number)
    kept = TUTORIALS / "sheets" / f"{name}-{language}.svg"
    assert kept.read_text(encoding="utf-8") == drawn, "run: python tutorials/sheets/make.py"
    assert kept.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    for x, y, size, said in re.findall(
        r'<text x="([\d.]+)" y="([\d.]+)".*?font-size="([\d.]+)".*?>(.*?)</text>', drawn
    ):
        assert float(x) + sheets.wide(said, float(size)) <= sheets.WIDTH, said
        assert float(y) <= sheets.HEIGHT - 8, said


def traces_in(page):
    return [page.parent / link for link in re.findall(r"\]\(([\w./-]+\.json\.gz)\)", page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", ["traces.md", "zh/traces.md"])
def test_traces_to_download_are_there_and_open_in_perfetto(page):
    traces = traces_in(TUTORIALS / page)
    assert len(traces) >= 6
    for path in traces:
        text = gzip.decompress(path.read_bytes()).decode()
        events = json.loads(text)["traceEvents"]
        assert any(event.get("ph") == "X" and event.get("dur", 0) > 0 for event in events), path
        assert not re.search(r"/(home|root|work|tmp|Users)/", text), path


def test_each_trace_has_a_question_and_an_answer():
    for page in ("traces.md", "zh/traces.md"):
        text = (TUTORIALS / page).read_text(encoding="utf-8")
        assert text.count("<details>") == len(traces_in(TUTORIALS / page))


def sections():
    found = set()
    for lesson in TUTORIALS.glob("[0-9][0-9]*-*.py"):
        found |= set(re.findall(r"^## (\d\.\d+) ", lesson.read_text(encoding="utf-8"), flags=re.M))
    return found


def test_topics_of_the_seed_are_taught_where_the_overview_says():
    text = (TUTORIALS / "README.md").read_text(encoding="utf-8").partition("Where each topic of the seed is taught")[2]
    rows = [line.strip("| ").split(" | ")[-1] for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 35
    named = {number for row in rows for number in re.findall(r"\b\d\.\d+\b", row)}
    assert named - sections() == set()


@pytest.mark.parametrize("page", ["glossary.md", "zh/glossary.md"])
def test_the_glossary_names_sections_that_exist(page):
    rows = [line for line in (TUTORIALS / page).read_text(encoding="utf-8").splitlines() if line.startswith("| ")][2:]
    named = {number for row in rows for number in re.findall(r"\b\d\.\d+\b", row.rpartition(" | ")[2])}
    assert named - sections() == set()


def test_the_chinese_glossary_has_every_term_of_the_english_one():
    english, chinese = (
        {line.split(" | ")[0].strip("| ") for line in (TUTORIALS / page).read_text(encoding="utf-8").splitlines()[4:]}
        for page in ("glossary.md", "zh/glossary.md")
    )
    assert english - chinese <= {"term"}
