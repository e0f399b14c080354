"""Bars on terminals that have room for them, and nowhere else."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dpscope.plain_text import BARS_NOTE, Bars, render_plain
from dpscope.reports.report import Report
from dpscope.reports.text import summary

BLOCKS = set("▒▏▎▍▌▋▊▉█")


@pytest.fixture
def results(make_result):
    return [make_result(median=10.0), make_result(method="flat", median=25.0, peak=2**19)]


def shown(results, *, width=120, encoding="utf-8", environment=None, **options):
    """The summary on a console as wide as that, line by line."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    console = Console(file=file, width=width, _environ=environment or {}, **{"force_terminal": True, **options})
    console.print(summary(Report.of(results), width=width))
    file.flush()
    return file.buffer.getvalue().decode(encoding).splitlines()


def line_of(method, lines):
    return next(line for line in lines if line.startswith(f"{method} "))


def test_one_is_shaded_and_what_is_beyond_is_solid():
    bars = Bars(cells=10, largest=2.5)
    assert bars.draw(1.0).plain == "▒▒▒▒"
    assert bars.draw(2.5).plain == "▒▒▒▒██████"
    assert bars.draw(1.5).plain == "▒▒▒▒██"
    assert bars.draw(1.53).plain == "▒▒▒▒██▏"
    assert bars.draw(0.5).plain == "██"
    assert bars.draw(None).plain == ""


@pytest.mark.parametrize("largest", [1.0, 1.04, 2.72, 9.9, 10.0, 37.0, 1e6])
def test_no_bar_is_longer_than_its_column(largest):
    bars = Bars(cells=10, largest=largest)
    assert all(len(bars.draw(largest * share).plain) <= 10 for share in (0.0, 0.1, 0.5, 0.99, 1.0))
    assert len(bars.draw(largest).plain) >= 5


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_a_bar_for_each_ratio_and_says_what_it_is(results, width):
    lines = shown(results, width=width, color_system=None)
    assert "▒▒▒▒██████" in line_of("flat", lines)
    assert "0.50×  ██" in line_of("flat", lines)
    assert BARS_NOTE in lines
    assert max(map(len, lines)) <= width


def test_bars_are_coloured_and_not_where_colour_is_unwanted(results):
    assert "\x1b[36m██████" in line_of("flat", shown(results, color_system="standard"))
    plain = shown(results, environment={"NO_COLOR": "1"}, color_system="standard")
    assert "\x1b[36m" not in "".join(plain)
    assert "██████" in line_of("flat", plain)


@pytest.mark.parametrize(
    "options",
    [{"width": 60}, {"force_terminal": False}, {"environment": {"TERM": "dumb"}}],
    ids=["narrow", "pipe", "dumb"],
)
def test_without_room_or_a_terminal_there_are_none_and_no_figure_is_cut(results, options):
    lines = shown(results, color_system=None, **options)
    assert not BLOCKS & set("".join(lines))
    assert BARS_NOTE not in lines
    assert "2.50×" in line_of("flat", lines)
    assert "…" not in "".join(lines)


def test_summary_txt_has_none(results):
    assert not BLOCKS & set(render_plain(summary(Report.of(results))))


def test_a_terminal_that_is_not_in_unicode_has_bars_of_ascii(results):
    line = line_of("flat", shown(results, encoding="ascii", color_system=None))
    assert "----######" in line
