"""Figures of memory: bars that add up, areas as high as the live total, phases and peaks by their names."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from dpscope.reports.looks import COMPONENT_COLOURS, colour_of
from dpscope.reports.memory.figures import draw_breakdown, draw_timeline
from dpscope.reports.memory.text import composition_of, timeline_of
from dpscope.reports.report import compare_results
from dpscope.vocabulary.components import component_named
from tests.unit.reports.figure_words import extent, texts, written

MIB = 2**20
KEYS = {component_named(key).marked(): key for key in COMPONENT_COLOURS}


@pytest.fixture(scope="module")
def rows(measured_both_ways):
    return compare_results(measured_both_ways())


@pytest.fixture(scope="module")
def breakdown(rows):
    return draw_breakdown(rows)


@pytest.fixture(scope="module")
def timeline_figure(rows):
    return draw_timeline(rows)


def bars(ax):
    """Component -> where its bar begins and ends, for each row of a panel."""
    found = {}
    for bar in ax.patches:
        if isinstance(bar, Rectangle) and bar.get_gid():
            label, place = bar.get_gid().split(":")
            found.setdefault(int(place), {})[KEYS[label]] = (bar.get_x(), bar.get_x() + bar.get_width(), bar)
    return found


# The breakdown


def test_the_bars_of_a_method_add_up_to_its_peak(rows, breakdown):
    left, _ = breakdown.axes
    for place, segments in bars(left).items():
        edges = sorted((start, end) for start, end, _ in segments.values())
        assert edges[0][0] == 0
        assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(edges))
        assert edges[-1][1] == pytest.approx(composition_of(rows[place]).total / MIB)


def test_every_bar_is_as_long_as_its_component(breakdown):
    left, _ = breakdown.axes
    flat = {key: end - start for key, (start, end, _) in bars(left)[1].items()}
    assert flat["per_sample_gradients"] == pytest.approx(800)
    assert flat["activations"] == pytest.approx(40)
    assert "norm_samples" not in flat


def test_the_extra_over_standard_goes_right_for_more_and_left_for_less(breakdown):
    _, right = breakdown.axes
    found = bars(right)
    assert 0 not in found  # standard holds no more than itself
    flat = {key: end - start for key, (start, end, _) in found[1].items()}
    assert flat == pytest.approx({"per_sample_gradients": 800, "activation_hooks": 60, "activations": -260})
    ghost = {key: end - start for key, (start, end, _) in found[2].items()}
    assert sum(ghost.values()) == pytest.approx(228, abs=0.01)
    assert "+600 MiB" in written(right.figure) and "−50.0 MiB" in written(right.figure)


def test_a_remainder_below_zero_stands_left_of_zero_and_the_total_is_still_right(make_memory_result):
    figure = draw_breakdown(compare_results([make_memory_result(unattributed=-30)]))
    start, end, _ = bars(figure.axes[0])[0]["unattributed"]
    assert (start, end) == pytest.approx((0, -30))
    assert "671 MiB" in written(figure)


def test_without_standard_the_second_panel_says_so(make_memory_result):
    words = written(draw_breakdown(compare_results([make_memory_result("ghost")])))
    assert "nothing to compare with:\nno standard at this size" in words
    alone = written(draw_breakdown(compare_results([make_memory_result("standard")])))
    assert "nothing to compare with:\nstandard is the only method" in alone


def test_rows_without_a_breakdown_are_named_with_the_reason(make_result, make_memory_result):
    results = [make_memory_result(), make_result(method="flash"), make_result(method="flat", status="oom")]
    figure = draw_breakdown(compare_results(results))
    title = " ".join(figure.get_suptitle().split())
    assert "Not drawn: flash (no breakdown by component was measured), flat (out of memory)" in title
    assert len(bars(figure.axes[0])) == 1


def test_the_legend_names_the_components_that_are_there_in_words_and_marks_the_private_ones(rows, breakdown):
    legend = [text.get_text() for text in breakdown.legends[0].get_texts()]
    assert "model parameters" in legend
    assert "per-sample gradients (private only)" in legend
    assert not any("_" in label for label in legend)
    standard = draw_breakdown(rows[:1]).legends[0].get_texts()
    assert not any("private" in text.get_text() for text in standard)


# The timeline


def areas(ax):
    """Component -> the filled area of a panel."""
    return {area.get_label(): area for area in ax.collections if area.get_label() in COMPONENT_COLOURS}


def test_the_stack_is_as_high_as_the_live_total_at_every_event(rows, timeline_figure):
    figure = timeline_figure
    for row, ax in zip(rows, figure.axes, strict=True):
        timeline = timeline_of(row)
        tops = {}
        for area in areas(ax).values():
            for x, y in area.get_paths()[0].vertices:
                tops[x] = max(tops.get(x, 0.0), y)
        for event, total, following in zip(timeline.events, timeline.totals, timeline.totals[1:], strict=False):
            # A level holds until the next event, where the edge goes up or down to the next level.
            assert tops[event] >= total / MIB - 1e-6 or tops[event] >= following / MIB - 1e-6
        assert max(tops.values()) == pytest.approx(max(timeline.totals) / MIB)


def test_a_panel_a_method_on_one_scale_with_units(timeline_figure):
    figure = timeline_figure
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["standard", "flat", "ghost", "flash"]
    assert len({ax.get_ylim() for ax in figure.axes}) == 1
    assert all(ax.get_ylabel() == "live memory (MiB)" for ax in figure.axes)
    assert figure.axes[-1].get_xlabel() == "allocations and frees within the step, in order"


def test_the_phases_are_marked_where_they_begin_and_end_and_named_at_their_strips(rows):
    figure = draw_timeline(rows[:1])
    (ax,) = figure.axes
    marks = {line.get_xdata()[0] for line in ax.get_lines() if len(set(line.get_xdata())) == 1}
    assert {0, 24, 48, 49, 52} <= marks
    starts = {"forward": 0, "backward": 24, "clip": 48, "noise": 49, "optimizer": 52}
    assert [strip.get_x() for strip in ax.patches] == list(starts.values())
    figure.draw_without_rendering()
    names = {text.get_text(): text.get_window_extent() for text in texts(figure) if text.get_gid() == "phase"}
    bands = dict(zip(starts, (strip.get_window_extent() for strip in ax.patches), strict=True))
    assert all(band.y0 > ax.get_window_extent().y1 for band in bands.values())
    for name in ("forward", "backward", "noise"):
        assert bands[name].x0 <= names[name].x0 and names[name].x1 <= bands[name].x1
    narrow = names["clip"]  # wider than its strip
    assert narrow.y0 >= bands["clip"].y1 - 2
    assert narrow.x1 == pytest.approx(bands["clip"].x1, abs=2)


def test_the_peak_is_marked_with_its_value_and_what_made_it(rows, timeline_figure):
    figure = timeline_figure
    for row, ax in zip(rows, figure.axes, strict=True):
        timeline = timeline_of(row)
        (marker,) = [line for line in ax.get_lines() if line.get_marker() == "v"]
        assert marker.get_xydata()[0] == pytest.approx(
            (timeline.events[timeline.peak], timeline.totals[timeline.peak] / MIB)
        )
    labels = [text.get_text() for text in texts(figure) if text.get_gid() == "peak"]
    assert labels[0] == "peak 701 MiB in backward: aten::bmm in blocks.3.up"


def test_a_long_module_name_is_shortened_into_the_room_there_is(make_memory_result):
    result = make_memory_result()
    result.memory["peak"]["module"] = ".".join(["transformer", *("layer" * 8,) * 6, "projection"])
    figure = draw_timeline(compare_results([result]))
    (label,) = [text for text in texts(figure) if text.get_gid() == "peak"]
    assert "…" in label.get_text() and label.get_text().endswith("projection")
    frame = figure.axes[0].get_window_extent()
    assert frame.x0 <= extent(label).x0 and extent(label).x1 <= frame.x1


def test_an_older_file_without_a_timeline_is_drawn_by_its_stages(make_memory_result):
    figure = draw_timeline(compare_results([replace(make_memory_result(), timeline={})]))
    (line,) = figure.axes[0].get_lines()
    assert list(line.get_ydata()) == [100, 300, 600]
    assert "0_model_loaded" in written(figure)
    assert "stages of the run (total only)" in written(figure)


# Both


def test_a_component_has_the_same_colour_in_every_figure_and_legend(breakdown, timeline_figure):
    seen = {}
    for ax in breakdown.axes:
        for segments in bars(ax).values():
            for key, (_, _, bar) in segments.items():
                seen.setdefault(key, set()).add(to_hex(bar.get_facecolor()).upper())
    for ax in timeline_figure.axes:
        for key, area in areas(ax).items():
            seen.setdefault(key, set()).add(to_hex(area.get_facecolor()[0]).upper())
    for figure in (breakdown, timeline_figure):
        for patch, text in zip(figure.legends[0].get_patches(), figure.legends[0].get_texts(), strict=True):
            key = next(key for key in seen if text.get_text().startswith(component_named(key).label))
            seen[key].add(to_hex(patch.get_facecolor()).upper())
    assert seen == {key: {colour_of(key)} for key in seen}
    assert len(seen) == len(COMPONENT_COLOURS)


def test_what_only_private_training_holds_is_hatched_and_nothing_else_is(breakdown):
    left, _ = breakdown.axes
    hatched = {key for segments in bars(left).values() for key, (_, _, bar) in segments.items() if bar.get_hatch()}
    assert hatched == {"activation_hooks", "per_sample_gradients", "norm_samples"}
