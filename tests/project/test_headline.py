"""The headline table: the pages are what the script writes, and no page gives a second figure for one of its rows."""

from __future__ import annotations

import json
import re
import runpy
from types import SimpleNamespace

import pytest

from tests import ROOT

# Steps as CUDA graphs are no rows of the table: their page has figures of its own.
GRAPHED = ROOT / "docs" / "cuda-graphs.md"
PROSE = sorted({*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md")} - {GRAPHED})
RATIO = re.compile(r"(?<![\w.])\d+\.\d+\s?×(?!\s?\d)")


@pytest.fixture(scope="module")
def headline():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "headline.py")))


@pytest.fixture(scope="module")
def run(headline):
    return json.loads((headline.RESULTS / "headline.json").read_text(encoding="utf-8"))


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


def test_pages_are_what_the_script_writes(headline):
    for page in headline.PAGES:
        text, run = (ROOT / page.path).read_text(encoding="utf-8"), json.loads(page.results.read_text(encoding="utf-8"))
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
        "flat": {"status": "not measured"},
        "ghost": {"status": "refused", "reason": "Tied."},
    }
    run = {"rows": {"gpt2": {"label": "GPT-2", "label_zh": "GPT-2", "cells": cells}}}
    assert headline.table(run, chinese=False)[2] == ("| GPT-2 | 53 ms, 1.0 GiB | not measured | refused |")
    rows = run["rows"].values()
    assert headline.reasons(rows, headline.COLUMNS, chinese=False) == ["GPT-2, Opacus ghost: Tied."]
    assert headline.reasons(rows, ("flat",), chinese=False) == []


def test_the_table_has_the_columns_of_its_run_and_says_what_they_are_relative_to(headline):
    done = {"status": "ok", "ms": 20.0, "peak_bytes": 2**30, "time_ratio": 0.7, "peak_ratio": 1.0}
    rows = {"gpt2": {"label": "GPT-2", "label_zh": "GPT-2", "cells": {"standard": done, "flash graphed": done}}}
    run = {"command": "x", "date": "2026-01-01", "device": "GPU", "versions": {"torch": "2"}, "rows": rows}
    text = headline.block(run, lambda path: path, chinese=False)
    assert "| model, batch | ordinary training | **flash, CUDA graph** |" in text
    assert "relative to eager ordinary training" in text and "Compiled" not in text


def test_the_table_of_engines_has_a_line_for_each_and_the_models_they_were_tried_on(headline):
    done = {"status": "ok", "ms": 20.0, "peak_bytes": 2**30, "time_ratio": 1.5, "peak_ratio": 2.0}
    rows = {
        "gpt2": {"label": "GPT-2", "cells": {"functorch": done, "opake": {"status": "failed", "reason": "it breaks"}}},
        "t5": {"label": "T5", "cells": {"flash": done}},
    }
    run = {"command": "x", "date": "2026-01-01", "device": "GPU", "versions": {"torch": "2"}, "rows": rows}
    text = headline.engines_block(run, lambda path: path)
    assert "| Opacus functorch | 1.50×, 2.00× |" in text and "T5" not in text
    assert "| opake | fails |" in text and "- GPT-2, opake: it breaks." in text


def test_the_overhead_of_the_trainer_is_a_line_for_each_size(headline):
    row = {"logical": 32, "physical": 8, "length": 512, "loop_ms": 300.0, "trainer_ms": 306.0}
    rows = [{**row, "ratio": 1.02, "low_ratio": 1.0, "high_ratio": 1.04, "pairs": []}]
    run = {"command": "x", "date": "2026-01-01", "device": "GPU", "trainer": {"rows": rows}}
    page = next(page for page in headline.PAGES if page.table == "trainer")
    text = headline.written(page, f"a\n{headline.BEGIN}\nold\n{headline.END}\nb", run)
    assert "| 32 samples × 512 in batches of 8 | 300 ms | 306 ms | 1.02× (1.00–1.04) |" in text and "old" not in text
