"""What is said of a step whose figures are known: the hand-made one to the last microsecond, and real ones."""

from __future__ import annotations

import pytest

from dpscope.instruments.trace.events import parse_events
from dpscope.instruments.trace.summary import summarise
from tests.unit.instruments.trace.handmade import START, annotation, gpu_step, operator

US = 1e-3  # milliseconds


@pytest.fixture(scope="module")
def summary():
    return summarise([parse_events(gpu_step())])


def by(rows, *keys):
    """The rows as a table: what identifies them -> the row."""
    return {tuple(row[key] for key in keys) if len(keys) > 1 else row[keys[0]]: row for row in rows}


def test_the_host_spends_a_step_in_phases_between_them_and_waiting(summary):
    host = {row["phase"]: row["cpu_ms"] for row in summary["phases"]}
    expected = {"forward": 200, "backward": 300, "clip": 150, "optimizer": 100, "between phases": 160}
    assert host == pytest.approx({name: value * US for name, value in {**expected, "wait for the GPU": 90}.items()})
    assert sum(host.values()) == pytest.approx(summary["step_ms"]) == pytest.approx(1.0)


def test_gpu_work_belongs_to_the_phase_that_asked_for_it_on_whatever_thread(summary):
    gpu = {row["phase"]: row["gpu_ms"] for row in summary["phases"]}
    expected = {"forward": 100, "backward": 150, "clip": 35, "optimizer": 120, "between phases": 20}
    assert gpu == pytest.approx({name: value * US for name, value in {**expected, "wait for the GPU": 0}.items()})


def test_the_gpu_is_busy_or_idle_and_it_is_known_why(summary):
    gpu = summary["gpu"]
    assert gpu["busy_ms"] == pytest.approx(385 * US)
    assert gpu["host_busy_ms"] == pytest.approx(805 * US)  # until the last launch
    assert gpu["idle_ms"] == pytest.approx(615 * US)
    assert gpu["idle_waiting_for_host_ms"] == pytest.approx((40 + 140 + 80 + 110 + 120) * US)
    assert gpu["idle_between_queued_ms"] == pytest.approx(5 * US)  # the copy had been asked for already
    assert gpu["idle_at_end_ms"] == pytest.approx(120 * US)
    assert gpu["overlap_ms"] == pytest.approx(40 * US)
    assert gpu["kernels"] == 5
    assert gpu["mean_kernel_us"] == pytest.approx((100 + 150 + 30 + 80 + 40) / 5)


def test_gpu_time_goes_to_the_innermost_operator_and_sums_to_the_step(summary):
    rows = by(summary["operators"], "operator", "phase")
    assert rows["aten::addmm", "forward"]["gpu_ms"] == pytest.approx(100 * US)
    assert rows["aten::linear", "forward"]["gpu_ms"] == 0
    assert rows["aten::mm", "backward"]["gpu_ms"] == pytest.approx(150 * US)
    assert rows["aten::_local_scalar_dense", "clip"]["gpu_ms"] == pytest.approx(5 * US)
    total = sum(row["gpu_ms"] for row in summary["operators"])
    gpu = summary["gpu"]
    assert total - gpu["overlap_ms"] + gpu["idle_ms"] == pytest.approx(summary["step_ms"])


def test_a_kernel_that_no_operator_launched_goes_under_its_own_name(summary):
    row = by(summary["operators"], "operator", "phase")["kernel _adam_kernel", "optimizer"]
    assert (row["count"], row["gpu_ms"]) == (1, pytest.approx(80 * US))


def test_self_time_is_what_an_operator_does_not_leave_to_others(summary):
    rows = by(summary["operators"], "operator", "phase")
    assert rows["aten::linear", "forward"]["self_cpu_ms"] == pytest.approx(20 * US)
    assert rows["aten::addmm", "forward"]["self_cpu_ms"] == pytest.approx(80 * US)
    assert rows["aten::item", "clip"]["self_cpu_ms"] == pytest.approx(10 * US)


def test_kernels_come_in_families_with_the_time_of_each(summary):
    families = {row["family"]: row["ms"] for row in summary["families"]}
    assert sum(families.values()) == pytest.approx(425 * US)
    products = [row for row in summary["kernels"] if row["kernel"].startswith("nvjet")]
    assert {row["family"].lower() for row in products} == {"gemm"}
    assert sum(row["ms"] for row in products) == pytest.approx(250 * US)


def test_kernels_and_operators_are_found_by_the_words_people_look_for(summary):
    named = by(summary["named"], "word")
    assert (named["reduce"]["kernels"], named["reduce"]["kernel_ms"]) == (1, pytest.approx(30 * US))
    assert (named["elementwise"]["kernels"], named["elementwise"]["kernel_ms"]) == (1, pytest.approx(40 * US))
    assert (named["norm"]["operators"], named["norm"]["operator_gpu_ms"]) == (1, pytest.approx(30 * US))
    assert named["einsum"]["operators"] == named["clip"]["kernels"] == 0


def test_modules_get_the_time_of_their_backward_operators_too(summary):
    modules = by(summary["modules"], "module")
    assert modules["head"]["gpu_ms"] == pytest.approx((100 + 150) * US)
    assert modules["head"]["phases"] == pytest.approx({"forward": 100 * US, "backward": 150 * US})
    assert sum(row["gpu_ms"] for row in summary["modules"]) == pytest.approx(425 * US)


def test_steps_are_averaged(summary):
    second = [{**each, "ts": each["ts"] + 2000} for each in gpu_step()]
    for each in second:
        if "correlation" in each["args"]:
            each["args"] = {**each["args"], "correlation": each["args"]["correlation"] + 1000}
    both = summarise([parse_events([*gpu_step(), *second])])
    assert both["steps"] == 2
    for part in ("phases", "operators", "families", "synchronisations", "copies"):
        for one, two in zip(summary[part], both[part], strict=True):
            assert two == pytest.approx(one)


def test_without_a_gpu_the_operators_and_what_is_outside_them_sum_to_the_step():
    events = [
        annotation("ProfilerStep#0", 0, 100),
        annotation("forward", 10, 60),
        operator("aten::linear", 20, 40),
        operator("aten::addmm", 25, 30),
        operator("aten::relu", 75, 5, thread=9),  # another thread's: beside the step, not in it
    ]
    summary = summarise([parse_events(events)])
    assert summary["basis"] == "cpu"
    assert "gpu" not in summary
    assert {row["operator"]: row["self_cpu_ms"] for row in summary["operators"]} == pytest.approx(
        {"aten::linear": 10 * US, "aten::addmm": 30 * US}
    )
    assert summary["outside_operators_ms"] == pytest.approx(60 * US)


def test_a_phase_within_another_counts_for_itself_alone():
    events = [
        annotation("ProfilerStep#0", 0, 100),
        annotation("backward", 10, 80),
        annotation("clip", 30, 20),
        operator("aten::mul", 35, 10),
        operator("aten::mm", 60, 10),
    ]
    summary = summarise([parse_events(events)])
    times = {row["phase"]: row["cpu_ms"] for row in summary["phases"]}
    assert times == pytest.approx({"backward": 60 * US, "clip": 20 * US, "between phases": 20 * US})
    assert {row["operator"]: row["phase"] for row in summary["operators"]} == {
        "aten::mul": "clip",
        "aten::mm": "backward",
    }


def test_a_recording_without_marked_steps_is_one_step():
    summary = summarise([parse_events([operator("aten::mm", 5, 20), operator("aten::mm", 40, 10)])])
    assert (summary["steps"], summary["step_ms"]) == (1, pytest.approx(45 * US))


def allocation(start, size, total=None):
    args = {"Bytes": size, "Device Type": 0 if total is None else 1, "Total Allocated": total or 0, "Ev Idx": start}
    return {
        "ph": "i",
        "cat": "cpu_instant_event",
        "name": "[memory]",
        "pid": 1,
        "tid": 1,
        "ts": START + start,
        "args": args,
    }


def over_time(*events):
    step = [annotation("ProfilerStep#1", 0, 10_000), annotation("dpscope:forward", 0, 10_000)]
    return summarise([parse_events([*step, *events])])["memory"]["over_time"]


def test_memory_over_time_is_the_allocators_total_where_it_keeps_one():
    assert over_time(allocation(1, 100, 500), allocation(2, -50, 450)) == {
        "gpu": [(pytest.approx(0.001), 500), (pytest.approx(0.002), 450)]
    }


def test_memory_over_time_on_the_cpu_counts_from_where_the_recording_began():
    assert over_time(allocation(1, 100), allocation(2, 30), allocation(3, -100)) == {
        "cpu": [(pytest.approx(0.001), 100), (pytest.approx(0.002), 130), (pytest.approx(0.003), 30)]
    }


def test_a_long_recording_keeps_its_highest_moments():
    (points,) = over_time(*(allocation(at, 1, 9999 if at == 777 else at) for at in range(1, 4001))).values()
    assert len(points) == 500
    assert (pytest.approx(0.777), 9999) in points
