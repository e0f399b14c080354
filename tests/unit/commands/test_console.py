"""What commands print at their end."""

from __future__ import annotations

from pathlib import Path

from dpscope.commands.sweeping import make_console, name_files


def test_every_file_written_gets_a_line_and_the_page_is_named_last(capsys):
    name_files(make_console(), [Path("a/report.html"), Path("a/b.json")])
    assert capsys.readouterr().out == "\nWritten:\n  a/report.html\n  a/b.json\n\nOpen: a/report.html\n"
