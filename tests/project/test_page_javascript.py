"""The page's JavaScript passes a linter, as the one script that a page holds; `make test` installs it where npm is."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from dpscope.reports.page import render
from tests import ROOT

LINTER = ROOT / "node_modules" / ".bin" / "oxlint"
STATIC = Path(render.__file__).parent / "static"

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not LINTER.exists(),
    reason="the page's JavaScript is linted by oxlint, which is not installed here: npm install --no-package-lock",
)


def lint(script: str, folder: Path) -> list[tuple[int, str]]:
    """(line, what is wrong with it) of a script; not a module, but like one nobody else uses its names."""
    file = folder / "page.js"
    file.write_text(script, encoding="utf-8")
    command = [str(LINTER), "--config", str(ROOT / ".oxlintrc.json"), "--format", "json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    found = json.loads(done.stdout)["diagnostics"]
    return [(each["labels"][0]["span"]["line"], f"{each['message']} ({each['code']})") for each in found]


def place_of(line: int, script: str) -> str:
    """FILE:LINE of a line of the page's script."""
    for file in STATIC.rglob("*.js"):
        text = file.read_text(encoding="utf-8")
        first = script[: script.index(text)].count("\n") + 1
        if first <= line < first + text.count("\n"):
            return f"{file.relative_to(ROOT)}:{line - first + 1}"
    return f"line {line}"


def test_the_pages_script_passes_the_linter(tmp_path):
    script = render._own_script()
    assert [f"{place_of(line, script)}: {wrong}" for line, wrong in lint(script, tmp_path)] == []


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("setUpNothing();", "setUpNothing"),
        ("function nobodyCalls() { return 1; }", "nobodyCalls"),
        ("document.title = location.hash == '1' ? 'a' : 'b';", "==="),
        ("{ const escapeText = 1; document.title = escapeText; }", "escapeText"),
    ],
)
def test_a_planted_fault_is_found_and_its_file_named(planted, found, tmp_path):
    script = render._own_script()
    file = STATIC / "page.js"
    text = file.read_text(encoding="utf-8")
    faulty = script.replace(text, f"{planted}\n{text}")
    ((line, wrong),) = lint(faulty, tmp_path)
    assert found in wrong and faulty.splitlines()[line - 1] == planted
    assert place_of(script[: script.index(text)].count("\n") + 1, script) == f"{file.relative_to(ROOT)}:1"
