"""Two sweeps side by side: what belongs together, what counts as a change, and what nobody can say."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from dpscope.errors import UserError
from dpscope.reports.against.data import set_against
from dpscope.reports.against.quantities import QUANTITIES
from dpscope.reports.against.text import DRAWN_ROWS, change_charts, headline, render_against, sentences
from dpscope.reports.report import Report

MIB = 2**20


@pytest.fixture
def timed(make_result):
    """A result with ten steps spread around a median."""

    def make(median=10.0, *, spread=0.02, steps=10, environment=None, **values):
        result = make_result(median=median, **values)
        timing = {"p10_ms": median * (1 - spread), "p90_ms": median * (1 + spread), "step_ms": [median] * steps}
        return replace(result, timing=result.timing | timing, environment=result.environment | (environment or {}))

    return make


def compare(now, before):
    return set_against(Report.of(now), Report.of(before), names=("new", "old"))


def only_pair(now, before):
    (pair,) = compare([now], [before]).pairs
    return pair


def verdict_on(figure, now, before):
    return only_pair(now, before).changes[figure].verdict


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [(100.0, 90.0, "faster"), (100.0, 110.0, "slower"), (100.0, 103.0, "within spread"), (100.0, 100.0, "the same")],
)
def test_a_time_changed_where_the_spreads_do_not_overlap(timed, before, now, verdict):
    assert verdict_on("time", timed(now), timed(before)) == verdict


def test_a_change_too_small_to_repeat_is_none_however_narrow_the_spread(timed):
    assert verdict_on("time", timed(100.9, spread=0.001), timed(100.0, spread=0.001)) == "within spread"
    assert verdict_on("time", timed(101.1, spread=0.001), timed(100.0, spread=0.001)) == "slower"


def test_of_few_steps_and_of_a_busy_machine_there_is_no_verdict(timed):
    assert verdict_on("time", timed(50.0, steps=4), timed(100.0)) == "too few steps"
    assert verdict_on("time", timed(50.0), timed(100.0, steps=4)) == "too few steps"
    assert verdict_on("time", timed(20.0, spread=0.25), timed(100.0)) == "not steady"
    said = " ".join(sentences(compare([timed(50.0, steps=4)], [timed(100.0)])))
    assert "fewer than 5 steps were timed. Measure with --steps 5 or more" in said
    assert headline(compare([timed(50.0, steps=4)], [timed(100.0)])) == (
        "No verdict on the time of 1 row compared: nothing else changed."
    )


@pytest.mark.parametrize(("now", "verdict"), [(1006, "larger"), (994, "smaller"), (1004, "the same")])
def test_memory_repeats_so_half_a_percent_counts(timed, now, verdict):
    assert verdict_on("memory", timed(peak=now * MIB), timed(peak=1000 * MIB)) == verdict


def test_peaks_that_were_taken_in_different_ways_are_not_compared(timed):
    result = timed(peak=MIB)
    other = replace(result, memory={"source": "cuda_allocator", "peak_bytes": 9 * MIB})
    change = only_pair(other, result).changes["memory"]
    assert (change.verdict, change.relative, change.now.value) == ("measured differently", None, 9 * MIB)


def test_where_only_one_sweep_tracked_memory_the_peaks_beside_the_times_are_compared(timed, make_memory_result):
    tracked = make_memory_result("standard")
    beside = {"source": "cpu_allocator", "peak_bytes": 2 * MIB}
    time = replace(timed(), spec=tracked.spec | {"instrument": "time"}, memory=beside)
    (pair,) = compare([time, tracked], [replace(time, memory=beside | {"peak_bytes": MIB})]).pairs
    assert (pair.changes["memory"].before.value, pair.changes["memory"].now.value) == (MIB, 2 * MIB)
    (pair,) = compare([time, tracked], [time, tracked]).pairs
    assert pair.changes["memory"].now.value == tracked.memory["peak_bytes"]


def test_bytes_are_compared_with_bytes_of_the_same_source(timed):
    def moved(count, source="measured"):
        traffic = {"dram_read_bytes": count, "dram_write_bytes": 0}
        return replace(timed(), ncu={"source": source, "traffic": traffic})

    assert verdict_on("traffic", moved(103), moved(100)) == "more"
    assert verdict_on("traffic", moved(101), moved(100)) == "the same"
    assert verdict_on("traffic", moved(300), moved(100, "estimate")) == "measured differently"
    shown = str(compare([moved(3e6, "estimate")], [moved(1e6, "estimate")]))
    assert "More DRAM bytes: standard at batch 2, sequence 8 (≈1.00 MB → ≈3.00 MB, +200.0%)." in shown


def test_a_sweep_against_itself_says_that_nothing_changed(timed):
    results = [timed(), timed(25.0, method="flat"), timed(method="ghost", status="oom")]
    against = compare(results, results)
    assert headline(against) == "Nothing changed in 3 rows compared."
    assert (against.changed, against.differences, sentences(against), change_charts(against)) == (False, [], [], [])
    assert "Measured on the same machine with the same versions and settings." in str(against)


def test_rows_are_paired_across_machines_steps_and_seeds_and_by_nothing_less(timed):
    here = timed(seed=1, warmup=2)
    assert len(compare([here], [timed(environment={"gpu": "a GPU"})]).pairs) == 1
    for change in ({"batch_size": 4}, {"dtype": "bf16"}, {"optimizer": "sgd"}, {"noise_multiplier": 0.0}):
        with pytest.raises(UserError, match="no row in common"):
            compare([here], [timed(**change)])


def test_a_changed_file_of_ones_own_workload_is_a_difference_and_no_other_workload(timed):
    def own(digest):
        result = timed()
        workload = {"kind": "custom", "name": "mine.py:make", "file": f"/{digest}/mine.py", "sha256": digest * 8}
        return replace(result, spec=result.spec | {"workload": workload})

    against = compare([own("b")], [own("a")])
    assert [name for name, _, _ in against.differences] == ["workload's file", "workload's text"]


def test_what_is_not_the_same_about_the_two_is_named_with_the_machine_first(timed):
    before = timed(environment={"gpu": "A100", "torch": "2.6", "git_commit": "one", "flavour": "x"}, seed=1)
    now = timed(environment={"gpu": "H200", "torch": "2.11", "git_commit": None, "flavour": "y"}, seed=2)
    found = compare([now], [before]).differences
    assert found == [
        ("GPU", "A100", "H200"),
        ("torch", "2.6", "2.11"),
        ("dpscope's commit", "one", "—"),
        ("flavour", "x", "y"),
        ("seed", "1", "2"),
    ]


def test_of_several_rows_that_could_be_paired_the_likest_come_together(timed):
    few, many = timed(10.0, warmup=1), timed(20.0, warmup=2)
    pairs = compare([many, few], [few, many]).pairs
    assert [(pair.before.median_ms, pair.now.median_ms) for pair in pairs] == [(20.0, 20.0), (10.0, 10.0)]


def test_another_status_is_a_finding_and_says_why(timed):
    against = compare([timed()], [timed(status="oom", reason="the GPU was full")])
    assert headline(against) == "Of 1 row compared: 1 with another status; 0 without a change."
    assert sentences(against) == ["standard at batch 2, sequence 8: oom before, ok now (the GPU was full)"]
    assert "oom → ok" in str(against)


def test_rows_of_one_sweep_alone_are_named(timed):
    text = str(compare([timed(), timed(method="flash")], [timed(), timed(method="flat"), timed(method="ghost")]))
    assert "Only before: flat, ghost on tiny at batch 2, sequence 8, fp32, adamw" in text
    assert "Only now: flash on tiny at batch 2, sequence 8, fp32, adamw" in text


def test_without_a_row_in_common_the_error_says_what_each_has(timed):
    with pytest.raises(UserError) as error:
        compare([timed(method="flash")], [timed(method="ghost")])
    assert "new: flash on tiny at batch 2" in str(error.value)
    assert "old: ghost on tiny at batch 2" in str(error.value)


def test_where_standard_changed_too_the_ratios_tell_what_is_the_methods_own(timed):
    before = [timed(100.0), timed(200.0, method="flat"), timed(300.0, method="ghost")]
    now = [timed(50.0), timed(100.0, method="flat"), timed(300.0, method="ghost")]
    against = compare(now, before)
    said = next(sentence for sentence in sentences(against) if sentence.startswith("Ordinary training"))
    assert said.endswith("beyond the spread they changed for ghost at batch 2, sequence 8 3.00× → 6.00×.")
    assert "Faster: standard at batch 2, sequence 8 (100.0 ms → 50.0 ms, −50.0%); flat" in sentences(against)[0]


def test_a_ratio_changed_only_beyond_what_both_spreads_allow(timed):
    pair = compare([timed(100.0), timed(206.0, method="flat")], [timed(100.0), timed(197.0, method="flat")]).pairs[1]
    assert pair.changes["time"].verdict == "slower"
    assert pair.changes["time_ratio"].verdict == "within spread"


def test_the_data_frame_has_a_record_for_each_row_of_either_sweep(timed):
    frame = compare([timed(90.0), timed(method="flash")], [timed(100.0), timed(method="flat")]).to_pandas()
    assert list(frame["in"]) == ["both", "before", "now"]
    assert frame["time_change"][0] == pytest.approx(-0.1)
    assert (frame["time_verdict"][0], frame["time_p10_before_ms"][0]) == ("faster", 98.0)
    assert (frame["status_before"][1], frame["status_now"].isna()[1]) == ("ok", True)


def test_the_chart_shows_each_change_with_what_the_spreads_allow(timed):
    against = compare([timed(90.0), timed(80.0, method="flat")], [timed(100.0), timed(80.0, method="flat")])
    (chart,) = change_charts(against)  # memory did not change
    first, second = chart.views[0].data["bars"]
    assert (first["relative"], first["tone"]) == (pytest.approx(-0.1), "less")
    assert first["range"] == pytest.approx((90 * 0.98 / 102 - 1, 90 * 1.02 / 98 - 1))
    assert (second["relative"], second["tone"]) == (0.0, "none")
    assert chart.views[0].says == "Step time: 1 of 2 rows changed, −10.0% (standard at batch 2, sequence 8)."


def test_of_very_many_rows_those_that_changed_most_are_drawn_and_all_are_in_the_csv(timed):
    sizes = range(1, DRAWN_ROWS + 11)
    now = [timed(100.0 + size, batch_size=size) for size in sizes]
    against = compare(now, [timed(100.0, batch_size=size) for size in sizes])
    view = change_charts(against)[0].views[0]
    assert [bar["relative"] for bar in view.data["bars"]] == pytest.approx([size / 100 for size in sizes][10:])
    assert len(view.table.rows) == len(sizes)
    assert f"The {DRAWN_ROWS} rows that changed most are drawn." in view.says


def test_the_page_tells_the_same_and_escapes_what_results_hold(timed):
    evil = "<script>alert(1)</script>"
    spec = timed().spec
    make = lambda median: replace(timed(median), experiment=evil, spec=spec | {"method": evil})  # noqa: E731
    page = render_against(compare([make(90.0)], [make(100.0)]))
    assert "Of 1 row compared: 1 faster; 0 without a change." in page
    assert evil not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; at batch 2, sequence 8" in page
    charts = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])["charts"]
    assert [chart["key"] for chart in charts] == ["time-change"]


def test_a_row_of_which_one_measurement_failed_keeps_the_verdicts_on_its_figures(timed):
    failed = replace(timed(method="flat"), spec=timed(method="flat").spec | {"instrument": "memory"}, status="failed")
    sweeps = [[timed(), timed(median, method="flat"), failed] for median in (90.0, 100.0)]
    pair = compare(*sweeps).pairs[1]
    assert [pair.verdict(quantity) for quantity in QUANTITIES] == ["faster", "the same", "failed"]
