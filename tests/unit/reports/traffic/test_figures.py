"""The figures of traffic, looked at as a reader would: what stands where, what it is called, and what covers what."""

from __future__ import annotations

import functools

import pytest

from dpscope.reports.looks import METHOD_COLOURS
from dpscope.reports.report import compare_results
from dpscope.reports.traffic.figures import ROOFLINE, TRAFFIC_BYTES, draw_roofline, draw_traffic_bytes
from tests.unit.reports.figure_words import overlapping
from tests.unit.reports.traffic_results import kernel_rows, results_for, traffic_of
from tests.unit.reports.writing import write

METHODS = ("standard", "flat", "ghost", "flash")


def rows(*methods, **options):
    return compare_results(results_for(*methods, **options))


@functools.cache
def roofline(*methods, **options):
    """Drawn once for all tests that only look at it."""
    return draw_roofline(rows(*methods, **options))


def texts(figure):
    """Everything written in a figure, title and legend included."""
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text() and text.get_visible()]


def total(figures):
    return figures["dram_read_bytes"] + figures["dram_write_bytes"]


def points(ax):
    """(x, y, colour, filled) of every marker."""
    lines = (line for line in ax.get_lines() if line.get_linestyle() == "None")
    return [
        (*line.get_xdata(), *line.get_ydata(), line.get_markeredgecolor(), line.get_markerfacecolor() != "white")
        for line in lines
    ]


def test_a_step_stands_at_its_intensity_and_its_rate():
    """Of the captured step: 108.6 GFLOP, 2.149 GB, 19 ms."""
    (ax,) = roofline().axes
    x, y, colour, filled = points(ax)[0]
    assert x == pytest.approx(108_582_141_952 / 2_149_329_408)
    assert y == pytest.approx(108_582_141_952 / 0.019)
    assert (colour, filled) == (METHOD_COLOURS[0], True)
    assert [point[2] for point in points(ax)] == list(METHOD_COLOURS[:4])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_the_roofs_are_drawn_with_their_values():
    figure = roofline()
    told = texts(figure)
    assert "tensor cores 624 TFLOP/s" in told
    assert "FP32 50.0 TFLOP/s" in told
    assert "DRAM 4.00 TB/s" in told
    sloping = [
        line for line in figure.axes[0].get_lines() if len(set(line.get_ydata())) == 2 and len(line.get_xdata()) == 2
    ]
    (line,) = sloping
    assert [y / x for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)] == pytest.approx([4.0e12] * 2)


def test_without_roofs_the_figure_says_so():
    results = results_for()
    for result in results:
        if result.ncu:
            result.ncu["ceilings"] = {}
    told = " ".join(texts(draw_roofline(compare_results(results))))
    assert "no roofs were measured here" in told


def test_an_estimate_is_hollow_and_the_title_says_it():
    figure = roofline(measured=False)
    assert not any(filled for *_, filled in points(figure.axes[0]))
    assert "an ESTIMATE from tensor sizes, not measured" in figure.get_suptitle()
    assert "hollow" in figure.get_suptitle()
    assert "flat (estimate)" in texts(figure)
    assert "an ESTIMATE from tensor sizes" in draw_traffic_bytes(rows(measured=False)).get_suptitle()


def test_estimates_among_measurements_are_told_apart():
    mixed = compare_results(results_for("standard") + results_for("ghost", measured=False))
    figure = draw_roofline(mixed)
    assert [filled for *_, filled in points(figure.axes[0])] == [True, False]
    assert "ESTIMATE" not in figure.get_suptitle()
    bars = draw_traffic_bytes(mixed)
    assert "≈ and pale: an estimate" in bars.get_suptitle()
    assert [patch.get_alpha() for patch in bars.axes[0].patches] == [None, None, 0.55, 0.55]


def test_the_kernels_that_move_most_are_there_with_names():
    figure = roofline(per_kernel=True)
    assert any(text.startswith("nvjet") for text in texts(figure))
    assert "small and numbered: the kernels that move most" in figure.get_suptitle()
    legend = {handle.get_label(): handle.get_marker() for handle in figure.legends[0].legend_handles}
    numbers = [marker for marker in legend.values() if marker.startswith("$")]
    assert numbers == [f"${number + 1}$" for number in range(len(numbers))] != []
    assert set(numbers) <= {line.get_marker() for line in figure.axes[0].get_lines()}


@pytest.mark.parametrize("options", [{}, {"per_kernel": True}, {"measured": False}])
def test_no_two_words_cover_each_other(options):
    assert overlapping(roofline(**options)) == []


def test_a_bar_is_as_long_as_what_was_read_and_written():
    (ax,) = draw_traffic_bytes(rows()).axes
    lengths = [patch.get_width() for patch in ax.patches]
    expected = [
        traffic_of(method)[name] / 1e9 for method in METHODS for name in ("dram_read_bytes", "dram_write_bytes")
    ]
    assert lengths == pytest.approx(expected)
    assert "(GB)" in ax.get_xlabel()
    assert [text.get_text() for text in ax.texts if "×" in text.get_text()] == ["1.00×", "1.93×", "1.25×", "1.16×"]


def test_with_kernels_a_bar_is_made_of_families_and_stays_as_long():
    (ax,) = draw_traffic_bytes(rows(per_kernel=True)).axes
    for place, method in enumerate(METHODS):
        parts = [patch.get_width() for patch in ax.patches if patch.get_gid().endswith(f":{place}")]
        assert sum(parts) == pytest.approx(total(traffic_of(method)) / 1e9)
        assert len(parts) == len({row["family"] for row in kernel_rows(method)}) + 1  # and what kernels leave over
    assert "clipping" in texts(ax.figure)
    assert "not seen kernel by kernel" in texts(ax.figure)


def test_every_size_has_its_panel_on_one_scale():
    sizes = (256, 1024)
    several = compare_results([r for length in sizes for r in results_for("standard", "ghost", seq_len=length)])
    for draw in (draw_roofline, draw_traffic_bytes):
        figure = draw(several)
        assert [ax.get_title(loc="left") for ax in figure.axes] == [f"batch 4, sequence {length}" for length in sizes]
        assert len({ax.get_xlim() for ax in figure.axes}) == 1


def test_rows_without_a_time_have_no_place_on_a_roofline():
    assert draw_roofline(rows(timed=False)) is None
    assert draw_traffic_bytes(rows(timed=False)) is not None


def test_files_are_named_and_the_same_every_time(tmp_path):
    few = rows("standard", "flat")
    first = write((ROOFLINE, TRAFFIC_BYTES), few, tmp_path / "a", ("png", "svg"))
    again = write((ROOFLINE, TRAFFIC_BYTES), few, tmp_path / "b", ("png", "svg"))
    assert [path.name for path in first] == ["roofline.png", "roofline.svg", "traffic_bytes.png", "traffic_bytes.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


def test_results_without_traffic_give_no_figure(tmp_path, make_result):
    assert write((ROOFLINE, TRAFFIC_BYTES), compare_results([make_result()]), tmp_path) == []
    assert list(tmp_path.iterdir()) == []
