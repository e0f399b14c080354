"""What a person reads of captures: GPU time by phase and method, what the GPU waited for, and whether tools agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpscope.instruments.nsys.reading import read_timeline
from dpscope.instruments.nsys.summary import summarise_timeline
from dpscope.plain_text import render_plain
from dpscope.reports.report import Report
from dpscope.reports.tables import Row
from dpscope.reports.text import summary
from dpscope.reports.trace.text import agreement
from tests.fake_tools.nsys_exports import a_step


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    return summarise_timeline(read_timeline(a_step(tmp_path_factory.mktemp("nsys") / "step.sqlite").write()))


@pytest.fixture
def captured(make_result, capture):
    """A result of nsys, with changes to its figures."""

    def make(method="standard", gpu=None, **changes):
        result = make_result(method=method, instrument="nsys", **changes)
        part = {**capture, "gpu": {**capture["gpu"], **(gpu or {})}}
        return replace(result, nsys=part, timing={}, memory={}, avg_time_ms=None)

    return make


def row_of(method, text, heading):
    lines = text.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith(heading))
    line = next(line for line in lines[place:] if line.startswith(f"{method} "))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def in_one_line(text):
    return " ".join(text.split())


def test_gpu_time_is_shown_by_phase_with_the_ratio_to_standard(captured):
    text = render_plain(summary(Report.of([captured(gpu={"total_ms": 0.2275}), captured("ghost")])))
    headings = "method forward backward clip optimizer between phases GPU time × busy kernels"
    assert headings in in_one_line(text)
    assert row_of("ghost", text, "Nsight Systems") == [
        *("ghost", "100.0 µs", "290.0 µs", "30.0 µs", "30.0 µs", "5.0 µs"),
        *("455.0 µs", "2.00×", "46%", "6"),
    ]


def test_what_the_gpu_waited_for_is_a_sentence(captured):
    text = in_one_line(render_plain(summary(Report.of([captured()]))))
    assert "standard: the GPU idles 525.0 µs of 980.0 µs, 515.0 µs of it waiting for the host: launch-bound" in text
    busy = captured(gpu={"idle_ms": 0.02, "idle_waiting_for_host_ms": 0.0})
    assert "launch-bound" not in render_plain(summary(Report.of([busy])))


@pytest.mark.parametrize(("step_ms", "bound"), [(0.5, False), (0.6, True)])
def test_where_the_unprofiled_step_is_known_it_decides_what_is_launch_bound(captured, make_result, step_ms, bound):
    """nsys slows the host: 455 µs of kernels fill nine tenths of a step of 0.5 ms, whatever the capture looks like."""
    text = render_plain(summary(Report.of([make_result(median=step_ms), captured()])))
    assert ("launch-bound" in text) == bound


def test_a_capture_too_long_to_open_is_told(captured):
    text = render_plain(summary(Report.of([captured(gpu={"span_ms": 61_000})])))
    assert "standard: the capture is 61 s long, too large to open well: --captured-steps 1." in text
    assert "too large to open" not in render_plain(summary(Report.of([captured()])))


def test_kernels_copies_calls_and_gaps_have_their_tables(captured):
    text = render_plain(summary(Report.of([captured()])))
    assert row_of("standard", text, "Longest kernels") == ["standard", "380.0 µs", "84%", "3", "126.7 µs", "gemm"]
    assert row_of("standard", text, "Copies") == ["standard", "1.0", "4.0 KiB", "5.0 µs", "Host-to-Device"]
    assert row_of("standard", text, "CUDA calls")[-1] == "cudaLaunchKernel"
    gap = row_of("standard", text, "Longest idle gaps")
    assert gap == ["standard", "340.0 µs", "waiting for the host; optimizer; adam"]


def test_rows_that_only_nsys_saw_have_no_table_of_times(captured):
    text = render_plain(summary(Report.of([captured()])))
    assert "time/step" not in text
    assert "Nsight Systems" in text


def test_rows_that_nsys_did_not_see_have_no_section(make_result):
    assert "Nsight Systems" not in render_plain(summary(Report.of([make_result()])))


def test_a_failed_capture_is_told_with_its_reason(make_result, captured):
    failed = make_result(method="flat", instrument="nsys", status="failed", reason="no report, do this")
    text = render_plain(summary(Report.of([captured(), failed])))
    assert "failed: flat at batch 2, sequence 8: no report, do this" in in_one_line(text)


def traced(make_result, **gpu_ms):
    phases = [{"phase": name, "cpu_ms": 1.0, "gpu_ms": ms} for name, ms in gpu_ms.items()]
    return replace(make_result(instrument="time"), trace={"gpu": {"busy_ms": 1}, "phases": phases, "step_ms": 50.0})


@pytest.mark.parametrize(
    ("backward", "says"),
    [
        (
            28.0,
            "agree on GPU time by phase: 45.5 ms and 44.4 ms in all; furthest apart in backward, 29.0 ms and 28.0 ms",
        ),
        (40.0, "DISAGREE on GPU time by phase: 45.5 ms and 56.4 ms in all; furthest apart in backward"),
    ],
)
def test_two_tools_that_saw_the_same_row_are_compared_phase_by_phase(captured, make_result, backward, says):
    ours = captured()
    longer = [{**phase, "gpu_ms": 100 * phase["gpu_ms"]} for phase in ours.nsys["phases"]]
    ours = replace(ours, nsys={**ours.nsys, "phases": longer})
    # Noise is short, and torch.profiler saw twice as much of it: not worth comparing.
    theirs = traced(make_result, forward=10, backward=backward, clip=3, noise=0.4, optimizer=3)
    row = Row({"nsys": ours, "trace": theirs})
    assert says in in_one_line(" ".join(agreement([row])))


def test_a_row_that_only_one_tool_saw_is_not_compared(captured):
    assert agreement([Row({"nsys": captured()})]) == []


def test_two_sizes_are_told_apart(captured):
    text = render_plain(summary(Report.of([captured(), captured(batch_size=4)])))
    assert "Nsight Systems, batch 2, sequence 8: GPU time by phase" in text
    assert "Nsight Systems, batch 4, sequence 8: GPU time by phase" in text
