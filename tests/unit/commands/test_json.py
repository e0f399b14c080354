"""`--json`: every document is what its schema in docs/schemas says."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from dpscope.cli import main
from dpscope.comparison import Comparison
from dpscope.plain_text import as_json
from tests import ROOT

jsonschema = pytest.importorskip("jsonschema")

SCHEMAS = ROOT / "docs" / "schemas"


def validate(document, name):
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)


def run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


@pytest.fixture
def comparison(measured_both_ways, tmp_path):
    results = tmp_path / "sweep" / "results"
    results.mkdir(parents=True)
    for number, result in enumerate(measured_both_ways()):
        (results / f"{number}.json").write_text(result.to_json())
    (results / "broken.json").write_text("{")
    return Comparison.read(tmp_path / "sweep")


def test_a_comparison_as_json(comparison):
    document = json.loads(as_json(comparison.to_dict()))
    validate(document, "compare")
    assert {row["method"] for row in document["rows"]} >= {"standard", "flat"}
    assert [item["file"].rpartition("/")[2] for item in document["left_out"]] == ["broken.json"]


def test_findings_are_written_by_every_report_and_damaged_results_are_told_by_the_exit_code(comparison):
    outcome = run("report", comparison.folder)
    assert outcome.exit_code == 1 and "broken.json" in outcome.output
    validate(json.loads((comparison.folder / "findings.json").read_text()), "findings")
    assert (comparison.folder / "findings.md").read_text().startswith("# Findings")
    (comparison.folder / "results" / "broken.json").unlink()
    assert run("report", comparison.folder).exit_code == 0


def test_a_notebook_shows_a_table_and_a_prompt_one_line(comparison):
    assert "<table" in comparison._repr_html_() and "costs" in comparison._repr_html_()
    assert len(repr(comparison)) < 200


def test_the_doctor_as_json(tmp_path):
    outcome = run("doctor", "--json", tmp_path / "doctor.json")
    document = json.loads((tmp_path / "doctor.json").read_text())
    validate(document, "doctor")
    assert document["ready"] == (outcome.exit_code == 0)


@pytest.mark.slow
def test_a_plan_as_json(tmp_path):
    sizes = ("--num-layers", 1, "--hidden-dim", 16, "--num-heads", 2, "--vocab-size", 32, "--seq-len", 8)
    run_of = ("--samples", 1000, "--epsilon", 8, "--epochs", 1, "--batch-size", 2, "--logical-batch", 8)
    asked = ("--gpu", "h100-80gb", "--methods", "flash", "--no-effects")
    outcome = run("plan", *asked, *sizes, *run_of, "--json", tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    validate(document, "plan")
    assert document["fits"] == (outcome.exit_code == 0)


def test_json_on_standard_output_is_alone_there():
    outcome = CliRunner().invoke(main, ["doctor", "--json", "-"])
    validate(json.loads(outcome.stdout), "doctor")
    assert "Opacus" in outcome.stderr


@pytest.mark.slow
def test_a_check_as_json(tmp_path):
    run("check", "--methods", "flash", "--no-neighbours", "--device", "cpu", "--json", tmp_path / "check.json")
    validate(json.loads((tmp_path / "check.json").read_text()), "check")


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    outcome = run("compare", "--json", tmp_path / "nowhere" / "all.json")
    assert outcome.exit_code == 2 and "there is no folder" in outcome.output
