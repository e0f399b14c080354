"""What runs before a commit is what `make test` runs, in the same versions: neither is written down a second time."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from tests import ROOT

PRE_COMMIT = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))


def prerequisites(target: str) -> list[str]:
    """What `make TARGET` makes first, by the Makefile's own database."""
    database = subprocess.run(
        ["make", "--print-data-base", "--question", target], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    (rule,) = re.findall(rf"^{target}:(.*)$", database, flags=re.MULTILINE)
    return rule.split()


def test_hooks_are_targets_that_make_test_makes_too():
    assert {repository["repo"] for repository in PRE_COMMIT["repos"]} == {"local"}, "a version of its own could drift"
    hooks = [hook for repository in PRE_COMMIT["repos"] for hook in repository["hooks"]]
    assert hooks
    for hook in hooks:
        command, target = hook["entry"].split()
        assert command == "make" and target in prerequisites("test")
        assert hook["language"] == "system" and hook["pass_filenames"] is False


def test_pre_commit_takes_the_configuration():
    pytest.importorskip("pre_commit")
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(ROOT / ".pre-commit-config.yaml")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_make_target_says_what_it_does():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, flags=re.MULTILINE)
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[0] for line in shown.splitlines()] == phony.split()
