"""Plain text is text wherever it is made."""

from __future__ import annotations

from dpscope.plain_text import render_plain


def test_in_a_notebook_text_is_returned_and_not_displayed(monkeypatch, capsys):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *shown: print("displayed"))
    assert render_plain("a table") == "a table\n"
    assert capsys.readouterr().out == ""
