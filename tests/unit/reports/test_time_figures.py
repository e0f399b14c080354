"""Time against memory, as a figure: points with their spread, ratios, and names in a legend."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib.container import ErrorbarContainer

from dpscope.reports.report import compare_results
from dpscope.reports.time_charts import draw_tradeoff
from tests.unit.reports.figure_words import written

MIB = 2**20


@pytest.fixture(scope="module")
def tradeoff(measured_both_ways):
    return draw_tradeoff(compare_results(measured_both_ways()))


def points(ax):
    """(x, y, from, to) of each marker with its spread."""
    found = []
    for container in ax.containers:
        assert isinstance(container, ErrorbarContainer)
        x, y = container[0].get_xydata()[0]
        ends = [end[0] for lines in container[2] for end in lines.get_segments()[0]]  # of those that have a spread
        found.append((x, y, *ends))
    return found


def test_a_point_has_its_median_its_peak_and_its_spread(tradeoff):
    left, _ = tradeoff.axes
    assert points(left)[1] == pytest.approx((256, 1309, 0.97 * 256, 1.05 * 256))


def test_beside_it_stand_the_ratios_to_standard(tradeoff):
    _, right = tradeoff.axes
    assert points(right)[0][:2] == (1, 1)
    assert points(right)[1][:2] == pytest.approx((256 / 127, 1309 / 709))
    assert "flat 2.02×, 1.85×" in written(right.figure)
    assert right.get_xlabel() == "time (× standard)"


def test_long_steps_are_in_seconds_and_large_peaks_in_gib(make_result):
    (row,) = compare_results([make_result(median=17489.0, peak=56 * 2**30)])
    figure = draw_tradeoff([row])
    assert points(figure.axes[0])[0][:2] == pytest.approx((17.489, 56))
    assert "peak memory (GiB)" in written(figure)
    assert any("(s)" in text for text in written(figure))
    assert "no standard at this size:\nno ratios" not in written(figure)


def test_without_standard_there_are_no_ratios_and_the_figure_says_so(make_result):
    figure = draw_tradeoff(compare_results([make_result(method="ghost")]))
    assert "no standard at this size:\nno ratios" in written(figure)


def test_a_busy_machine_is_marked_in_the_figure_too(make_result):
    shaky = make_result(method="flat")
    shaky = replace(shaky, timing={**shaky.timing, "p10_ms": 5.0, "p90_ms": 50.0})
    figure = draw_tradeoff(compare_results([make_result(), shaky]))
    assert any(text.startswith("flat") and "?" in text for text in written(figure))
    assert "step times varied by more than 1.5× within a row" in figure.get_suptitle()


def test_differences_within_noise_do_not_fill_the_panel(make_result):
    results = [make_result(peak=1000 * MIB), make_result(method="flat", peak=1001 * MIB)]
    low, high = draw_tradeoff(compare_results(results)).axes[1].get_ylim()
    assert high - low > 0.3


def test_no_axis_goes_below_zero_where_nothing_can_be(make_result):
    results = [make_result(median=1.0, peak=MIB), make_result(method="flat", median=900.0, peak=900 * MIB)]
    for ax in draw_tradeoff(compare_results(results)).axes:
        assert ax.get_xlim()[0] >= 0 and ax.get_ylim()[0] >= 0


def test_a_row_without_ratios_is_named_as_well(make_result):
    results = [make_result(), make_result(method="flat"), make_result(method="flash", batch_size=4)]
    legend = draw_tradeoff(compare_results(results)).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["standard 1.00×, 1.00×", "flat 1.00×, 1.00×", "flash"]
