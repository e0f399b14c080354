"""What all figures keep: words that cover nothing and can be read in print, and files named by what is in them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest

from dpscope.reports.drawing import DPI, PAGE_WIDTH, SMALL
from dpscope.reports.memory.figures import draw_breakdown, draw_timeline
from dpscope.reports.output import suffixed
from dpscope.reports.outputs import FIGURES
from dpscope.reports.report import compare_results
from dpscope.reports.time_charts import draw_tradeoff
from tests.unit.reports.figure_words import extent, overlapping, texts
from tests.unit.reports.writing import write

LONG = "my_packages_own_private_method_with_a_rather_long_name"
DRAWINGS = [draw_breakdown, draw_timeline, draw_tradeoff]


@pytest.fixture(scope="module")
def rows(measured_both_ways):
    return compare_results(measured_both_ways())


def many(measured_both_ways, count, **changes):
    """As many methods, all but the first four with long names and nearly the same figures."""
    timed, tracked = measured_both_ways(**changes)[4:6]
    results = measured_both_ways(**changes)
    for number in range(4, count):
        name = f"{LONG}_{number}"
        results += [replace(timed, experiment=name), replace(tracked, experiment=name)]
    return compare_results(results[: 2 * count])


@pytest.mark.parametrize("draw", DRAWINGS)
@pytest.mark.parametrize("count", [1, 4, 6, 12])
def test_no_two_words_cover_each_other_and_none_leaves_the_figure(measured_both_ways, draw, count):
    figure = draw(many(measured_both_ways, count))
    assert overlapping(figure) == []
    page = figure.bbox.padded(1)
    assert [text.get_text() for text in texts(figure) if not _inside(extent(text), page)] == []


def _inside(box, page):
    return page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1


@pytest.mark.parametrize("draw", DRAWINGS)
def test_every_word_can_be_read_in_print(rows, draw):
    figure = draw(rows)
    assert min(text.get_fontsize() for text in texts(figure)) >= SMALL >= 7
    assert figure.get_figwidth() == PAGE_WIDTH
    assert "tiny, batch 2, sequence 8, fp32, adamw; a processor" in figure.get_suptitle()


def test_the_users_own_settings_of_matplotlib_neither_reach_the_figures_nor_are_changed(rows):
    with matplotlib.rc_context({"font.size": 31.0, "axes.labelsize": 29.0}):
        figure = draw_breakdown(rows)
        assert matplotlib.rcParams["font.size"] == 31.0
    assert max(text.get_fontsize() for text in texts(figure)) <= 8


@pytest.mark.parametrize("draw", DRAWINGS)
def test_rows_with_nothing_to_show_make_no_figure(make_result, draw):
    assert draw(compare_results([make_result(status="failed")])) is None


# Files


def test_every_figure_is_written_and_named(rows, tmp_path):
    paths = write(FIGURES, rows, tmp_path, ("png",))
    assert [path.name for path in paths] == [f"{figure.name}.png" for figure in FIGURES]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    for path in paths:
        assert int.from_bytes(path.read_bytes()[16:20], "big") == int(PAGE_WIDTH * DPI)  # pixels across
    assert DPI >= 200


def test_each_format_is_what_its_name_says_and_the_same_every_time(make_result, tmp_path):
    rows = compare_results([make_result(), make_result(method="flat", median=20.0)])
    paths = write(FIGURES, rows, tmp_path, ("png", "svg", "pdf"))
    magic = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    once = [path.read_bytes() for path in paths]
    assert all(data.startswith(magic[path.suffix]) for path, data in zip(paths, once, strict=True))
    assert b"peak memory (KiB)" in once[1]  # text stays text
    assert [path.read_bytes() for path in write(FIGURES, rows, tmp_path, ("png", "svg", "pdf"))] == once


def test_sizes_are_not_mixed_each_has_figures_of_its_own(make_result, tmp_path):
    results = [
        make_result(method=method, batch_size=batch, seq_len=length)
        for batch, length in ((2, 8), (4, 16))
        for method in ("standard", "flat")
    ]
    paths = write(FIGURES, compare_results(results), tmp_path, ("png",))
    assert [path.name for path in paths] == ["performance_tradeoff_bs2_seq8.png", "performance_tradeoff_bs4_seq16.png"]


@pytest.mark.parametrize(
    ("changes", "suffixes"),
    [
        ([{}, {"dtype": "bf16"}], ["_bs2_seq8_fp32", "_bs2_seq8_bf16"]),
        ([{}, {"steps": 2}, {"steps": 3}], ["_bs2_seq8", "_bs2_seq8-2", "_bs2_seq8-3"]),
    ],
)
def test_what_tells_sizes_apart_is_in_the_name(make_result, changes, suffixes):
    assert list(suffixed(compare_results([make_result(**change) for change in changes]))) == suffixes


def test_a_figure_that_cannot_be_written_leaves_nothing_half_done(rows, tmp_path):
    (tmp_path / "performance_tradeoff.png").mkdir()
    with pytest.raises(OSError):
        write(FIGURES, compare_results([rows[0].first]), tmp_path, ("png",))
    assert list(Path(tmp_path).iterdir()) == [tmp_path / "performance_tradeoff.png"]
