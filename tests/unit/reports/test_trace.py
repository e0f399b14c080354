"""Why a method is slower than standard: the parts are named, and they add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpscope.plain_text import render_plain
from dpscope.reports.report import Report
from dpscope.reports.tables import compare_results
from dpscope.reports.text import summary
from dpscope.reports.trace.data import boundness, differences
from dpscope.results.schema import parse_result
from tests.unit.reports.test_figures import extent, overlapping, texts
from tests.unit.reports.trace_results import make_trace, operator
from tests.unit.reports.writing import write


@pytest.fixture
def rows(make_result):
    """Timed and traced rows of methods -> their traces."""

    def make(median=10.0, **traces):
        results = []
        for method, trace in traces.items():
            results.append(make_result(method=method, median=median))
            traced = make_result(method=method, instrument="trace")
            results.append(parse_result(replace(traced, timing={}, memory={}, trace=trace).to_json()))
        return compare_results(results)

    return make


STANDARD = [operator("aten::mm", "backward", 5.0), operator("aten::add", "forward", 2.0)]
FLAT = [
    operator("aten::mm", "backward", 4.0),
    operator("aten::bmm", "backward", 9.0),
    operator("aten::add", "noise", 3.0),
]


def test_the_difference_is_sorted_and_says_what_is_new_what_grew_and_what_is_gone(rows):
    (found,) = differences(rows(standard=make_trace(STANDARD), flat=make_trace(FLAT, 2.5)))
    assert [(change.operator, change.phase, change.kind, change.ms) for change in found.changes[:-1]] == [
        ("aten::bmm", "backward", "new", 9.0),
        ("aten::add", "noise", "new in noise", 3.0),
        ("aten::mm", "backward", "shrank", -1.0),
        ("aten::add", "forward", "gone from forward", -2.0),
    ]
    assert found.changes[-1].operator.startswith("outside operators")
    assert found.changes[-1].ms == pytest.approx(1.5)
    assert found.total_ms == pytest.approx(18.5 - 8.0)


operators = st.lists(
    st.builds(
        operator,
        st.sampled_from(["a", "b", "c", "d"]),
        st.sampled_from(["forward", "clip"]),
        st.floats(0.001, 1e4),
        gpu=st.just(True),
    ),
    unique_by=lambda row: (row["operator"], row["phase"]),
    max_size=8,
)


@given(operators, operators, st.floats(0, 100), st.floats(0, 100))
def test_on_a_gpu_the_changes_sum_to_the_difference_of_the_traced_steps(before, after, idle, overlap):
    from dpscope.reports.tables import Row
    from dpscope.results.schema import Result

    def row(method, trace):
        spec = {"workload": {"name": "w"}, "instrument": "trace"}
        return Row({"trace": Result(experiment=method, config={}, spec=spec, trace=trace)})

    (found,) = differences(
        [
            row("standard", make_trace(before, 0.0, idle=idle)),
            row("ghost", make_trace(after, overlap, idle=1.0)),
        ]
    )
    assert found.basis == "gpu"
    assert sum(change.ms for change in found.changes) == pytest.approx(found.total_ms, abs=1e-6)


def test_without_a_traced_standard_there_is_no_difference(rows):
    assert differences(rows(flat=make_trace(FLAT))) == []


def test_standard_alone_differs_from_nothing(rows):
    assert differences(rows(standard=make_trace(STANDARD))) == []


GPU = [operator("aten::mm", "backward", 6.0, gpu=True)]


@pytest.mark.parametrize(("median", "bound"), [(6.1, False), (7.4, False), (7.6, True), (60.0, True)])
def test_launch_bound_is_decided_by_kernel_time_in_the_unprofiled_step(rows, median, bound):
    (row,) = rows(median=median, standard=make_trace(GPU, 0.0, idle=100.0))
    verdict = boundness(row)
    assert verdict.launch_bound is bound
    assert verdict.share == pytest.approx(6.0 / median)
    assert "the unprofiled step" in verdict.sentence


def test_a_cpu_row_is_neither_launch_bound_nor_not(rows):
    (row,) = rows(standard=make_trace(STANDARD))
    assert boundness(row) is None


def printed(found):
    return render_plain(summary(Report.of([result for row in found for result in row.measured.values()])))


def test_the_summary_shows_traced_and_unprofiled_steps_side_by_side(rows):
    text = printed(rows(standard=make_trace(STANDARD), flat=make_trace(FLAT, 2.5)))
    assert "traced step          8.00  18.50" in text
    assert "unprofiled step     10.00  10.00" in text
    assert "flat against standard: +10.50 ms a traced step" in text
    whole = next(line for line in text.splitlines() if line.startswith("the whole step"))
    assert whole.split()[-3:] == ["8.00", "18.50", "+10.50"]


def test_the_summary_of_a_gpu_says_busy_idle_and_whether_it_waits_for_the_host(rows):
    text = printed(rows(median=100.0, standard=make_trace(GPU, 0.0, idle=94.0)))
    assert "standard is launch-bound: the GPU works in 6% of the unprofiled step" in text
    assert "standard: no wait for the GPU within a step." in text


def test_gpu_columns_sum_to_the_traced_step_when_streams_overlap_too(rows):
    text = printed(rows(standard=make_trace(GPU, 1.5, idle=4.0)))
    lines = {line.rpartition("  ")[0].strip(): line.rpartition(" ")[2] for line in text.splitlines()}
    assert (lines["GPU idle"], lines["less: side by side"]) == ("4.00", "-1.50")
    assert ["traced", "step", "8.50", "8.50"] in [line.split() for line in text.splitlines()]


def test_what_was_asked_for_beside_times_is_told(rows):
    trace = make_trace(STANDARD)
    trace["modules"] = [
        {"module": name, "cpu_ms": ms, "gpu_ms": 0.0, "phases": {"forward": ms}}
        for name, ms in (("(no module)", 9.0), ("head", 4.0))
    ]
    asked = {"operator": "aten::bmm", "device": "cpu", "allocations": 1.0, "allocated_bytes": 3 * 2**20, "net_bytes": 0}
    trace["memory"] = {"operators": [asked], "highest_total_bytes": {}, "over_time": {}}
    trace["flops"] = {"aten::mm": 3e9, "aten::bmm": 1e9}
    text = " ".join(printed(rows(median=10.0, standard=trace)).split())
    assert "most expensive modules, forward and backward: head 4.0 ms." in text
    assert "ask for most memory in a step: aten::bmm 3.0 MiB." in text
    assert "4.00 GFLOP counted in a step, 0.4 TFLOP/s of the unprofiled step." in text


def test_a_long_difference_is_cut_and_still_adds_up(rows):
    many = [operator(f"aten::op{n}", "clip", 1.0 + n) for n in range(30)]
    text = printed(rows(standard=make_trace(STANDARD), flat=make_trace(many)))
    lines = text.partition("flat against standard")[2].splitlines()[2:]
    table = lines[: 1 + next(n for n, line in enumerate(lines) if line.startswith("the whole step"))]
    shown = [float(line.split()[-1]) for line in table[:-1]]
    assert len(shown) == 12
    assert sum(shown) == pytest.approx(float(table[-1].split()[-1].removesuffix("?")), abs=0.06)


def test_rows_without_traces_add_nothing_to_the_summary(make_result):
    assert "traced" not in render_plain(summary(Report.of([make_result()])))


def test_figures_are_drawn_from_traces(rows, tmp_path):
    from dpscope.reports.trace.figures import DRAWINGS

    found = rows(standard=make_trace(GPU, 0.0, idle=3.0), flat=make_trace([*GPU, *GPU[:0]], 0.0, idle=4.0))
    drawn = {name: draw(found) for name, (_, draw) in DRAWINGS.items()}
    assert all(figure is not None for figure in drawn.values())
    bars = drawn["trace_phases"].axes[0].patches
    assert sum(bar.get_width() for bar in bars) == pytest.approx(2 * 10.0)  # every bar is a whole unprofiled step


@pytest.mark.parametrize("count", [1, 3])
def test_no_two_words_cover_each_other_in_a_figure(rows, count):
    from dpscope.reports.trace.figures import DRAWINGS

    def many(method):
        return [operator(f"aten::a_rather_long_name_of_{method}_{n}", "clip", 0.1 * 3**n, gpu=True) for n in range(9)]

    methods = ("standard", "flat", "ghost", "flash")[: count + 1]
    found = rows(median=4e3, **{name: make_trace(many(name), 0.0, idle=3.0 * n) for n, name in enumerate(methods)})
    for _, draw in DRAWINGS.values():
        figure = draw(found)
        assert overlapping(figure) == []
        width, height = figure.canvas.get_width_height()
        for text in texts(figure):
            box = extent(text)
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text.get_text()


def test_nothing_is_drawn_without_traces(make_result):
    from dpscope.reports.trace.figures import DRAWINGS

    assert [draw(compare_results([make_result()])) for _, draw in DRAWINGS.values()] == [None, None, None]


def test_the_tables_are_there_in_full_as_csv(rows, tmp_path):
    import pandas as pd

    from dpscope.reports.trace.csv import TRACE_CSV

    (path,) = write(TRACE_CSV, rows(standard=make_trace(STANDARD), flat=make_trace(FLAT)), tmp_path)
    table = pd.read_csv(path)
    assert list(table.method) == ["standard"] * 2 + ["flat"] * 3
    assert table.self_cpu_ms.sum() == pytest.approx(5 + 2 + 4 + 9 + 3)
    assert set(table.operator) == {"aten::mm", "aten::add", "aten::bmm"}


def test_no_traces_no_csv(make_result, tmp_path):
    from dpscope.reports.trace.csv import TRACE_CSV

    assert write(TRACE_CSV, compare_results([make_result()]), tmp_path) == []
