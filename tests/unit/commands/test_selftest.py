"""`dpscope selftest` and `dpscope doctor`: what they say and when they say no."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dpscope.cli import main
from dpscope.vocabulary.methods import methods


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(main, arguments)


def test_selftest_takes_a_step_with_every_trainer(run):
    outcome = run("selftest")
    assert outcome.exit_code == 0, outcome.output
    for name in ("StandardTrainer", "DPSGDTrainer", "DPGhostClippingTrainer"):
        assert f"[TEST OK] {name} passed local test." in outcome.output
    assert outcome.output.count("[TEST OK]") == len(methods())


@pytest.mark.parametrize("fault", ["raises", "stands still"])
def test_selftest_says_which_trainer_does_not_work_and_tries_the_others(run, monkeypatch, fault):
    from dpscope.trainers.opacus import DPSGDTrainer

    def update(self):
        if fault == "raises":
            raise RuntimeError("broken on purpose")

    monkeypatch.setattr(DPSGDTrainer, "update", update)
    outcome = run("selftest")
    assert outcome.exit_code == 1
    assert "[TEST FAILED] flat: " in outcome.output
    assert "[TEST OK] StandardTrainer" in outcome.output
    assert "[TEST OK] DPGhostClippingTrainer" in outcome.output


def test_doctor_finds_what_dpscope_needs_and_says_how_to_mend_the_rest(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # no Nsight, whatever this machine has
    outcome = run("doctor")
    assert outcome.exit_code == 0
    assert "\x1b" not in outcome.output
    rows = {line.split("  ")[0]: line.split()[-1] for line in outcome.output.splitlines() if line}
    assert {"Python", "torch", "Opacus", "Disk"} <= set(rows)
    assert "install NVIDIA Nsight Compute" in " ".join(outcome.output.split())
    assert "dpscope compare" in outcome.output


def test_doctor_says_no_when_what_is_needed_is_not_there(run, monkeypatch):
    from dpscope.runner import diagnosis

    absent = diagnosis.Diagnosis("torch", diagnosis.ABSENT, "not there", "pip install torch", required=True)
    monkeypatch.setattr(diagnosis, "CHECKS", [lambda: [absent]])
    outcome = run("doctor")
    assert outcome.exit_code == 1
    assert "pip install torch" in outcome.output
    assert "Nothing can be measured before this is fixed: torch." in outcome.output
