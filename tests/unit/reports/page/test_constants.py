"""A fact that Python and the page's scripts share is defined in Python alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dpscope.reports import looks
from dpscope.reports.page import render
from dpscope.reports.report import Report

SCRIPTS = sorted((Path(render.__file__).parent / "static").rglob("*.js"))
COLOURS = {
    colour.upper()
    for colours in (
        looks.COMPONENT_COLOURS,
        looks.PHASE_COLOURS,
        looks.FAMILY_COLOURS,
        looks.DIRECTION_COLOURS,
        looks.ON_DARK,
    )
    for pair in colours.items()
    for colour in pair
    if colour.startswith("#")
} | {looks.GREW, looks.SHRANK, *looks.OWN_COLOURS, *looks.METHOD_COLOURS}


def code_of(script: Path) -> str:
    return re.sub(r"//.*", "", script.read_text(encoding="utf-8"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_no_script_holds_a_fact_of_its_own_that_python_has_too(script):
    code = code_of(script)
    written = {colour.upper() for colour in re.findall(r"#[0-9a-fA-F]{6}\b", code)} - {"#000000", "#FFFFFF"}
    assert not written & {colour.upper() for colour in COLOURS}
    assert not [mark for mark in render.CONSTANTS["marks"].values() if mark != "?" and mark in code]
    assert '"?"' not in code
    assert not re.search(r"\b(2 \*\* [123]0|1024|1048576)\b|TRIFLE =", code)


def test_the_page_hands_the_constants_over(make_result):
    page = render.render_page(Report.of([make_result()]))
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert data["constants"] == render.CONSTANTS


def test_every_marker_of_a_method_has_a_symbol():
    layout = next(script for script in SCRIPTS if script.name == "layout.js").read_text(encoding="utf-8")
    symbols = re.search(r"const SYMBOLS = \{(.*?)\n\};", layout, re.S)[1]
    assert set(re.findall(r'^  "(.)":', symbols, re.M)) == set(looks.METHOD_MARKERS)
