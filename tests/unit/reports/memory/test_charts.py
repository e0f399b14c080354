"""The memory charts hold what the results hold, to the byte, in few enough bytes of their own."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import accumulate

import pytest

from dpscope.reports.memory.figures import PANELS, memory_peak, memory_timeline
from dpscope.reports.memory.text import timeline_of
from dpscope.reports.page.render import render_page
from dpscope.reports.report import Report, compare_results
from dpscope.reports.trace.layers_chart import MOST_LINES, layers_memory, layers_time
from tests.made_up import renamed
from tests.unit.memory_results import MIB, make_timeline
from tests.unit.reports.trace_results import make_trace, operator

HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture
def rows(measured_both_ways):
    return compare_results(measured_both_ways())


def only(chart):
    (view,) = chart.views
    return view


def with_modules(result, modules):
    listed = [{"module": name, "components": parts} for name, parts in modules.items()]
    return replace(result, memory={**result.memory, "modules": listed})


# The peak


def test_every_bar_of_the_peak_holds_the_bytes_of_its_result(rows):
    view = only(memory_peak(rows))
    names = [component["name"] for component in view.data["components"]]
    assert "per-sample gradients" in names
    for row, bar in zip(rows, view.data["bars"], strict=True):
        peak = row.measured["memory"].memory["peak"]["components"]
        assert sorted(count for count in bar["bytes"] if count) == sorted(count for count in peak.values() if count)
        assert bar["total"] == row.measured["memory"].memory["peak_bytes"]
        assert bar["maker"] == "backward: aten::bmm in blocks.3.up"
    assert view.data["bars"][view.data["standard"]]["method"] == "standard"


def test_the_table_of_the_peak_says_the_same_as_the_bars(rows):
    view = only(memory_peak(rows))
    place = view.table.columns.index("per_sample_gradients_bytes")
    flat = next(line for line in view.table.rows if line[0] == "flat")
    assert flat[place] == 800 * MIB
    assert all(len(line) == len(view.table.columns) for line in view.table.rows)


def test_the_sentence_names_what_makes_most_of_the_extra(rows):
    assert "above all per-sample gradients +800.0 MiB" in only(memory_peak(rows)).says


def test_a_method_that_holds_less_is_told_what_it_spares(make_memory_result):
    light = make_memory_result("flash", peak={"model_parameters": 100, "activations": 10})
    heavy = make_memory_result("standard", peak={"model_parameters": 100, "activations": 300})
    assert "above all activations −290.0 MiB" in only(memory_peak(compare_results([heavy, light]))).says


def test_only_what_private_training_alone_holds_is_hatched(rows):
    hatched = {each["name"] for each in only(memory_peak(rows)).data["components"] if each["hatched"]}
    assert hatched <= {"activation hooks", "per-sample gradients", "norm samples"}
    assert hatched


def test_a_row_without_a_composition_is_named_with_the_reason(make_memory_result):
    results = [make_memory_result(), replace(make_memory_result("flat"), status="oom", memory={}, breakdown={})]
    view = only(memory_peak(compare_results(results)))
    assert [bar["method"] for bar in view.data["bars"]] == ["standard"]
    assert "Not drawn: flat (out of memory)." in view.says


def test_without_standard_there_are_bars_but_no_ratios(make_memory_result):
    view = only(memory_peak(compare_results([make_memory_result("flat")])))
    assert view.data["standard"] is None
    assert [bar["ratio"] for bar in view.data["bars"]] == [None]


# The timeline


def test_a_short_timeline_is_kept_whole(rows):
    view = only(memory_timeline(rows))
    for row, panel in zip(rows, view.data["panels"], strict=True):
        timeline = timeline_of(row)
        assert list(accumulate(panel["events"])) == timeline.events
        levels = [list(accumulate(changes)) for changes in panel["levels"]]
        assert [sum(counts) for counts in zip(*levels, strict=True)] == timeline.totals


def test_the_peak_of_a_thinned_panel_is_the_measured_one(make_memory_result):
    result = make_memory_result()
    timeline = make_timeline({"model_parameters": 3 * MIB + 1, "activations": 5 * MIB + 3}, points=2000)
    view = only(memory_timeline(compare_results([replace(result, timeline=timeline)])))
    (panel,) = view.data["panels"]
    levels = [list(accumulate(changes)) for changes in panel["levels"]]
    assert max(map(sum, zip(*levels, strict=True))) == panel["peak"]["bytes"] == 8 * MIB + 4
    assert panel["peak"]["event"] in list(accumulate(panel["events"]))


def test_the_table_has_the_fullest_moment_of_each_phase(rows):
    table = only(memory_timeline(rows)).table
    highest = max(line[table.columns.index("highest_bytes")] for line in table.rows if line[0] == "flat")
    flat = next(row for row in rows if row.method == "flat")
    assert highest == max(timeline_of(flat).totals)


def test_methods_beyond_what_fits_are_named(make_memory_result):
    many = [renamed(make_memory_result("flat"), f"method {n}") for n in range(PANELS + 1)]
    view = only(memory_timeline(compare_results(many)))
    assert len(view.data["panels"]) == PANELS
    assert f"method {PANELS} (only {PANELS} fit)" in view.says


def test_twelve_long_timelines_are_small(make_memory_result):
    peak = {key: (place + 1) * 10**9 + 7 for place, key in enumerate(make_memory_result().timeline["components"])}
    results = [
        replace(make_memory_result(method, batch_size=size), timeline=make_timeline(peak, points=1500))
        for size in (2, 4, 8)
        for method in ("standard", "flat", "ghost", "flash")
    ]
    chart = memory_timeline(compare_results(results))
    assert len(chart.views) == 3
    assert len(json.dumps(asdict(chart))) < 500_000  # every component changes at every event: no real step is as bad


# Layers


def test_repeated_modules_that_hold_alike_are_one_line_of_what_they_hold_together(make_memory_result):
    blocks = {f"blocks.{n}.up": {"activations": 10 * MIB, "gradients": 2 * MIB} for n in range(20)}
    result = with_modules(make_memory_result(), {**blocks, "head": {"activations": 50 * MIB}})
    up, head = only(layers_memory(compare_results([result]))).data["lines"]
    assert (head["name"], up["name"]) == ("head", "blocks.*.up")
    assert up["bars"] == [
        {"value": 240 * MIB, "count": 20, "parts": [("activations", 200 * MIB), ("gradients", 40 * MIB)]}
    ]


def blocks_of(count, cost=lambda block, name: 1.0):
    names = ("norm", *(f"attention.{part}" for part in ("query", "key", "value", "out")), "up", "down")
    return {f"blocks.{n}.{name}": {"activations": cost(n, name)} for n in range(count) for name in names}


UNEVEN = {
    "alike": lambda block, name: 5.0,
    "gradients of later layers": lambda block, name: 5.0 if block < 9 else 9.0,
    "every layer another": lambda block, name: 5.0 + block,
    "every module another": lambda block, name: 5.0 + 7 * ((31 * block + len(name)) % 13),
    "heavy layers far apart": lambda block, name: 50.0 if block % 5 == 0 else 1.0,
}


@pytest.mark.parametrize("kind", UNEVEN)
@pytest.mark.parametrize("count", [2, 20, 80])
def test_nine_tenths_of_every_method_are_drawn_by_name(kind, count, make_memory_result):
    modules = {"tokens": {"activations": 30.0}, "head": {"gradients": 31.0}, "(outside the modules)": {"inputs": 3.0}}
    methods = {
        "standard": {**modules, **blocks_of(count)},
        "flat": {**modules, **blocks_of(count, UNEVEN[kind])},
    }
    scaled = {m: {n: {k: v * MIB for k, v in c.items()} for n, c in costs.items()} for m, costs in methods.items()}
    results = [with_modules(make_memory_result(method), costs) for method, costs in scaled.items()]
    lines = only(layers_memory(compare_results(results))).data["lines"]
    assert len(lines) <= MOST_LINES + 1
    for place, costs in enumerate(scaled.values()):
        whole = sum(sum(cost.values()) for cost in costs.values())
        drawn = sum(line["bars"][place]["value"] for line in lines if line["bars"][place])
        by_name = sum(line["bars"][place]["value"] for line in lines if line["name"] != "(all others)")
        assert drawn == pytest.approx(whole)
        assert by_name >= 0.9 * whole
    if kind in ("alike", "gradients of later layers"):
        assert any("attention" in line["name"] for line in lines), "no coarser than need be"


def test_a_module_that_a_method_does_not_list_is_unknown_rather_than_zero(make_memory_result):
    standard = with_modules(make_memory_result(), {"head": {"activations": MIB}})
    flat = with_modules(make_memory_result("flat"), {"head": {"activations": MIB}, "tokens": {"activations": MIB}})
    lines = {
        line["name"]: line["bars"] for line in only(layers_memory(compare_results([standard, flat]))).data["lines"]
    }
    assert lines["tokens"][0] is None
    assert lines["tokens"][1]["value"] == MIB


def test_what_has_no_line_of_its_own_is_one_bar_and_in_the_sentence(make_memory_result):
    modules = {f"layer{n:02}": {"activations": (100 - n) * MIB} for n in range(MOST_LINES + 2)}
    result = with_modules(make_memory_result(), {**modules, "(other)": {"activations": MIB}})
    view = only(layers_memory(compare_results([result])))
    *named, others = view.data["lines"]
    assert len(named) == MOST_LINES
    rest = sum(100 - n for n in (MOST_LINES, MOST_LINES + 1)) + 1
    assert (others["name"], others["bars"][0]["value"]) == ("(all others)", rest * MIB)
    assert f"All other modules together: {rest}.0 MiB in standard." in view.says
    assert len(view.table.rows) == MOST_LINES + 3


def test_time_of_modules_is_drawn_only_where_it_was_traced(make_result):
    plain = replace(make_result(), trace=make_trace([operator("aten::mm", "forward", 3.0)]))
    plain = replace(plain, spec={**plain.spec, "instrument": "trace"})
    assert layers_time(compare_results([plain])) is None
    modules = [{"module": "head", "cpu_ms": 3.0, "gpu_ms": 0.0, "phases": {"forward": 1.0, "backward": 2.0}}]
    view = only(layers_time(compare_results([replace(plain, trace={**plain.trace, "modules": modules})])))
    (line,) = view.data["lines"]
    assert line["bars"] == [{"value": 3.0, "count": 1, "parts": [("backward", 2.0), ("forward", 1.0)]}]
    assert "3.0 ms in standard (head)" in view.says


# All of them


def test_there_is_no_chart_where_nothing_was_measured(make_result):
    rows = compare_results([make_result()])
    assert [chart(rows) for chart in (memory_peak, memory_timeline, layers_memory, layers_time)] == [None] * 4


def test_markup_in_names_stays_text(make_memory_result):
    result = renamed(with_modules(make_memory_result("flat"), {HOSTILE: {HOSTILE: MIB}}), HOSTILE)
    phases = [{**phase, "name": HOSTILE} for phase in result.timeline["phases"]]
    result = replace(result, timeline={**result.timeline, "phases": phases})
    page = render_page(Report.of([result]))
    assert "Layer by layer" in page
    assert HOSTILE not in page
    assert "<img src=x" not in page
