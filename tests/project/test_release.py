"""What goes out with a release says the same everywhere, and asks people for what helps them."""

from __future__ import annotations

import re

import pytest
import yaml

from dpscope.vocabulary.version import __version__
from tests import ROOT

CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
TEMPLATES = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def test_changelog_has_an_open_section_and_below_it_this_version_with_its_date():
    versions = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", CHANGELOG, flags=re.MULTILINE)
    assert len(versions) == CHANGELOG.count("\n## "), "a heading of another form"
    (unreleased, undated), (latest, date), *_ = versions
    assert (unreleased, undated) == ("Unreleased", "")
    assert latest == __version__ and date


def test_citation_names_this_version_and_its_date():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert f"## [{__version__}] - {citation['date-released']}\n" in CHANGELOG
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_wheels_that_a_readme_names_are_of_this_version(page):
    named = re.findall(r"dpscope-(\d[\w.]*)-py3-none-any\.whl", (ROOT / page).read_text(encoding="utf-8"))
    assert set(named) <= {__version__}


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_issue_templates_are_forms_that_ask_what_doctor_says(template):
    form = yaml.safe_load(template.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert any("`dpscope doctor`" in field["attributes"]["label"] for field in fields)


def test_security_says_how_to_report_and_asks_what_doctor_says():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "Report a vulnerability" in text and "`dpscope doctor`" in text and "dpscope.check_loop" in text
