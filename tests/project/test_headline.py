"""The headline table: the pages are what the script writes, and no page gives a second figure for one of its rows."""

from __future__ import annotations

import json
import re
import runpy
from types import SimpleNamespace

import pytest

from dpscope.errors import UserError
from tests import ROOT

# The table of engines is of a dated run of its own, in which they were measured side by side.
ENGINES = ROOT / "docs" / "engines.md"
PROSE = sorted({*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md")} - {ENGINES})
RATIO = re.compile(r"(?<![\w.])\d+\.\d+\s?×(?!\s?\d)")


@pytest.fixture(scope="module")
def headline():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "headline.py")))


@pytest.fixture(scope="module")
def run(headline):
    return json.loads(headline.RESULTS.read_text(encoding="utf-8"))


def paragraphs_outside_the_table(text: str) -> list[str]:
    text = re.sub(r"<!-- headline: begin -->.*?<!-- headline: end -->", "", text, flags=re.DOTALL)
    return re.split(r"\n\s*\n", text)


def second_figures(text: str, models: set[str]) -> list[str]:
    """Return paragraphs that name a model of the table and give a ratio outside of it."""
    return [
        part
        for part in paragraphs_outside_the_table(text)
        if RATIO.search(part) and any(re.search(rf"(?<!\w){re.escape(model)}", part) for model in models)
    ]


def models_of(run) -> set[str]:
    return {re.split(r"[ ,，]", row["label"])[0] for row in run["rows"].values()} - {"decoder"}


def test_pages_are_what_the_script_writes(headline, run):
    for page in headline.PAGES:
        text = (ROOT / page.path).read_text(encoding="utf-8")
        assert headline.written(page, text, run) == text, "run: python benchmarks/headline.py write"


def test_the_result_set_names_its_run(run):
    assert run["command"].startswith("python benchmarks/")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"])
    assert run["device"] and run["versions"]["torch"]


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_gives_a_second_figure_for_a_row(page, run):
    assert second_figures(page.read_text(encoding="utf-8"), models_of(run)) == []


def test_a_second_figure_is_found_outside_the_table_alone():
    table = "<!-- headline: begin -->\n| GPT-2 | 1.04× |\n<!-- headline: end -->"
    assert second_figures(f"{table}\n\nBERT and\nViT take 16 × 256.", {"GPT-2", "ViT"}) == []
    assert second_figures(f"{table}\n\nGPT-2 takes\n1.11× the time.", {"GPT-2"}) == ["GPT-2 takes\n1.11× the time."]


def test_a_cell_without_a_figure_says_why(headline):
    cells = {
        "standard": {"status": "ok", "ms": 53.4, "peak_bytes": 2**30},
        "ghost": {"status": "refused", "reason": "Tied."},
    }
    run = {"rows": {"gpt2": {"label": "GPT-2", "label_zh": "GPT-2", "cells": cells}}}
    assert headline.table(run, chinese=False)[2] == (
        "| GPT-2 | 53 ms, 1.0 GiB | not measured | refused | not measured | not measured | not measured |"
    )
    assert headline.reasons(run, chinese=False) == ["GPT-2, Opacus ghost: Tied."]


@pytest.mark.slow
def test_a_cell_is_measured_in_pairs_and_a_refused_one_has_its_reason(headline, tmp_path, monkeypatch):
    rows = {name: headline.ROWS[name] for name in ("vit",)}
    cells = {name: headline.CELLS[name] for name in ("standard", "flash", "ghost")}
    scope = headline.measure.__globals__
    monkeypatch.setitem(scope, "ROWS", rows)
    monkeypatch.setitem(scope, "CELLS", cells)
    loop = scope["Loop"]

    def refusing(row, cell, *, tiny):
        if cell.method == "ghost":
            raise UserError("it refuses.\nMore of it.")
        return loop(row, cell, tiny=tiny)

    monkeypatch.setitem(scope, "Loop", refusing)
    headline.measure(tmp_path, budget=1e9, tiny=True, only=[], command="x")
    found = json.loads((tmp_path / "headline.json").read_text())["rows"]["vit"]["cells"]
    assert found["standard"]["ms"] > 0 and found["standard"]["least_ms"] <= found["standard"]["most_ms"]
    assert found["flash"]["least_ratio"] <= found["flash"]["time_ratio"] <= found["flash"]["most_ratio"]
    assert found["ghost"] == {"status": "refused", "reason": "it refuses."}


def test_a_spent_budget_skips_cells_and_says_so(headline, tmp_path):
    headline.measure(tmp_path, budget=-1, tiny=True, only=["t5"], command="x")
    found = json.loads((tmp_path / "headline.json").read_text())["rows"]["t5"]["cells"]
    assert {cell["status"] for cell in found.values()} == {"not measured"} and len(found) == 6
