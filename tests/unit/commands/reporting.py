"""Runs `dpscope report` in this process, and looks at the files it leaves."""

from __future__ import annotations

from click.testing import CliRunner

from dpscope.cli import main


def report(*arguments):
    outcome = CliRunner().invoke(main, ["report", *map(str, arguments)])
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exception
    return outcome


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_file())
