"""Figures by what is in them: bars that add up, colours that stay the same, words that cover nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import matplotlib
import pytest
from matplotlib.colors import to_hex
from matplotlib.container import ErrorbarContainer
from matplotlib.patches import Rectangle

from dpscope.reports.figures.style import DPI, PAGE_WIDTH, SMALL
from dpscope.reports.joining import compare_results
from dpscope.reports.memory.data import composition_of, timeline_of
from dpscope.reports.memory.figures import draw_breakdown, draw_timeline, spread
from dpscope.reports.output import suffixed
from dpscope.reports.outputs import FIGURES
from dpscope.reports.palette import COMPONENT_COLOURS, METHOD_COLOURS, colour_of
from dpscope.reports.time.figures import draw_tradeoff
from dpscope.vocabulary.components import component_named
from tests.unit.reports.figure_words import extent, overlapping, texts
from tests.unit.reports.writing import write

MIB = 2**20
KEYS = {component_named(key).marked(): key for key in COMPONENT_COLOURS}
LONG = "my_packages_own_private_method_with_a_rather_long_name"


@pytest.fixture(scope="module")
def rows(measured_both_ways):
    return compare_results(measured_both_ways())


@pytest.fixture(scope="module")
def breakdown(rows):
    return draw_breakdown(rows)


@pytest.fixture(scope="module")
def timeline_figure(rows):
    return draw_timeline(rows)


@pytest.fixture(scope="module")
def tradeoff(rows):
    return draw_tradeoff(rows)


def many(measured_both_ways, count, **changes):
    """As many methods, all but the first four with long names and nearly the same figures."""
    timed, tracked = measured_both_ways(**changes)[4:6]
    results = measured_both_ways(**changes)
    for number in range(4, count):
        name = f"{LONG}_{number}"
        results += [replace(timed, experiment=name), replace(tracked, experiment=name)]
    return compare_results(results[: 2 * count])


def bars(ax):
    """Component -> where its bar begins and ends, for each row of a panel."""
    found = {}
    for bar in ax.patches:
        if isinstance(bar, Rectangle) and bar.get_gid():
            label, place = bar.get_gid().split(":")
            found.setdefault(int(place), {})[KEYS[label]] = (bar.get_x(), bar.get_x() + bar.get_width(), bar)
    return found


def written(figure):
    return [text.get_text() for text in texts(figure)]


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


def test_the_phases_are_marked_where_they_begin_and_end_and_named_above(rows):
    figure = draw_timeline(rows[:1])
    (ax,) = figure.axes
    marks = {line.get_xdata()[0] for line in ax.get_lines() if len(set(line.get_xdata())) == 1}
    assert {0, 24, 48, 49, 52} <= marks
    names = [text for text in texts(figure) if text.get_gid() == "phase"]
    from_left = sorted(names, key=lambda text: extent(text).x0)
    assert [text.get_text() for text in from_left] == ["forward", "backward", "clip", "noise", "optimizer"]
    assert all(extent(text).y0 > ax.get_window_extent().y1 for text in names)


def test_more_phases_than_fit_are_named_by_the_longest(make_memory_result):
    result = make_memory_result()
    phases = [{"name": f"micro-batch {n}", "start": n, "end": n + 1} for n in range(50)]
    long = {"name": "optimizer", "start": 50, "end": 59}
    figure = draw_timeline(compare_results([replace(result, timeline={**result.timeline, "phases": [*phases, long]})]))
    names = [text.get_text() for text in texts(figure) if text.get_gid() == "phase"]
    assert 3 < len(names) < 51
    assert "optimizer" in names
    assert overlapping(figure) == []


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


# The trade-off


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


def test_a_far_label_has_a_line_from_its_marker_to_itself(make_result):
    """Six methods at one point: not all of their names can stand beside it."""
    first = make_result(peak=1000 * MIB)
    same = [replace(first, experiment=f"a_method_at_the_same_point_{n}") for n in range(5)]
    figure = draw_tradeoff(compare_results([first, *same]))
    ax = figure.axes[0]
    figure.draw_without_rendering()
    marker = ax.transData.transform((10.0, 1000))
    lines = [text for text in ax.texts if text.get_text() == "" and text.arrow_patch is not None]
    labels = [extent(text) for text in ax.texts if text.get_text()]
    assert lines
    for line in lines:
        start, end = _ends(line)
        assert abs(start - marker).max() < 20
        assert any(box.padded(8).contains(*end) for box in labels)


def _ends(annotation):
    path = annotation.arrow_patch.get_path().vertices
    transform = annotation.arrow_patch.get_transform()
    return transform.transform(path[0]), transform.transform(path[-1])


# What all figures keep


@pytest.mark.parametrize("draw", [draw_breakdown, draw_timeline, draw_tradeoff])
@pytest.mark.parametrize("count", [1, 4, 6, 12])
def test_no_two_words_cover_each_other_and_none_leaves_the_figure(measured_both_ways, draw, count):
    figure = draw(many(measured_both_ways, count))
    assert overlapping(figure) == []
    page = figure.bbox.padded(1)
    assert [text.get_text() for text in texts(figure) if not _inside(extent(text), page)] == []


def _inside(box, page):
    return page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1


@pytest.mark.parametrize("name", ["breakdown", "timeline_figure", "tradeoff"])
def test_every_word_can_be_read_in_print(request, name):
    figure = request.getfixturevalue(name)
    assert min(text.get_fontsize() for text in texts(figure)) >= SMALL >= 7
    assert figure.get_figwidth() == PAGE_WIDTH
    assert "tiny, batch 2, sequence 8, fp32, adamw; a processor" in figure.get_suptitle()


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


def test_the_users_own_settings_of_matplotlib_neither_reach_the_figures_nor_are_changed(rows):
    with matplotlib.rc_context({"font.size": 31.0, "axes.labelsize": 29.0}):
        figure = draw_breakdown(rows)
        assert matplotlib.rcParams["font.size"] == 31.0
    assert max(text.get_fontsize() for text in texts(figure)) <= 8


@pytest.mark.parametrize("draw", [draw_breakdown, draw_timeline, draw_tradeoff])
def test_rows_with_nothing_to_show_make_no_figure(make_result, draw):
    assert draw(compare_results([make_result(status="failed")])) is None


# Colours


def _seen_with(weights, colour):
    """A colour's light as an eye sees it that lacks a kind of cone (Viénot, Brettel and Mollon 1999), gamma 2.2."""
    red, green, blue = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    light = [level**2.2 for level in (red, green, blue)]
    return [sum(w * part for w, part in zip(row, light, strict=True)) for row in weights]


EYES = {
    "all cones": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red cones": [[0.1124, 0.8876, 0.0], [0.1124, 0.8876, 0.0], [0.004, -0.004, 1.0]],
    "no green cones": [[0.2928, 0.7072, 0.0], [0.2928, 0.7072, 0.0], [-0.0223, 0.0223, 1.0]],
}


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("colours", [COMPONENT_COLOURS.values(), METHOD_COLOURS], ids=["components", "methods"])
def test_no_two_colours_look_alike_to_any_eye(colours, eye):
    """Two levels out of 255 of gamma-corrected light would be one colour; these are at least ten apart."""
    seen = [[max(level, 0.0) ** (1 / 2.2) * 255 for level in _seen_with(EYES[eye], colour)] for colour in colours]
    for one, other in combinations(seen, 2):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 10


def test_a_users_own_component_has_one_colour_and_none_of_the_known():
    assert colour_of("my_cache") == colour_of("my_cache")
    assert colour_of("my_cache") not in COMPONENT_COLOURS.values()


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


# Placing


@pytest.mark.parametrize(
    ("centres", "expected"),
    [
        ([10, 50, 90], [10, 50, 90]),
        ([50, 50, 50], [50, 61, 72]),
        ([0, 100, 100], [5, 84, 95]),
        ([100, 100, 100], [73, 84, 95]),
    ],
)
def test_names_in_a_strip_move_aside_and_stay_within_it(centres, expected):
    assert spread(centres, [10, 10, 10], 0, 100, 1) == expected
