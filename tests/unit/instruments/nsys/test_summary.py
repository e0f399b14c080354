"""What a capture says: a real one to the last nanosecond, small ones by hand, random ones against brute force."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing

import pytest

from dpscope.instruments.nsys.reading import UnreadableCapture, read_timeline
from dpscope.instruments.nsys.summary import summarise_timeline
from dpscope.results.payloads.trace import NsysPayload
from dpscope.results.schema import find_mismatch
from dpscope.vocabulary.phases import BETWEEN_PHASES, PHASES
from tests import DATA
from tests.fake_tools.nsys_exports import AUTOGRAD, MAIN, Export, a_step

REAL = DATA / "nsys_step.sqlite"  # one step on an H200, without NVTX ranges


@pytest.fixture(scope="module")
def real():
    return summarise_timeline(read_timeline(REAL))


@pytest.fixture
def step(tmp_path):
    return summarise_timeline(read_timeline(a_step(tmp_path / "step.sqlite").write()))


def ask(path, query):
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


# A real capture


def test_kernels_of_the_real_capture_are_counted_and_timed_exactly(real):
    assert real["kernel_total"] == {"calls": 298, "ms": 1.696405}
    assert len(real["kernels"]) == len(ask(REAL, "SELECT DISTINCT demangledName FROM CUPTI_ACTIVITY_KIND_KERNEL"))
    assert sum(kernel["ms"] for kernel in real["kernels"]) == pytest.approx(1.696405, abs=1e-12)
    longest = real["kernels"][0]
    assert (longest["calls"], longest["ms"]) == (51, 0.170719)
    assert longest["name"].startswith(
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda"
    )


def test_memsets_and_calls_of_the_real_capture_are_exact(real):
    assert real["memsets"] == {"calls": 16, "ms": 0.012576, "bytes": 352}
    assert real["copies"] == []
    calls = {call["name"]: (call["calls"], call["ms"]) for call in real["api"]}
    assert calls["cudaLaunchKernel"] == (206, 2.038401)
    assert calls["cudaDeviceSynchronize"] == (1, 0.045205)
    assert sum(count for count, _ in calls.values()) == 701


def test_the_real_captures_gpu_was_busy_as_long_as_its_one_stream(real):
    gpu = real["gpu"]
    assert gpu["span_ms"] == pytest.approx(33.863677 - 16.064658, abs=1e-12)
    # One stream: nothing overlaps, so busy is the sum of kernels and memsets.
    assert gpu["busy_ms"] == pytest.approx(1.696405 + 0.012576, abs=1e-9)
    assert gpu["total_ms"] == pytest.approx(gpu["busy_ms"], abs=1e-9)
    assert gpu["gaps"] == 313  # 298 kernels and 16 memsets, each after a pause
    assert gpu["idle_waiting_for_host_ms"] <= gpu["idle_ms"]


def test_a_capture_without_ranges_has_no_phases_and_is_counted_as_a_whole(real):
    assert real["phases"] == []
    assert real["steps"] is None


# A real capture with NVTX ranges: two steps of ghost clipping

RANGED = REAL.with_name("nsys_nvtx_step.sqlite")


@pytest.fixture(scope="module")
def ranged():
    return summarise_timeline(read_timeline(RANGED))


def test_phases_of_a_real_capture_hold_all_gpu_time_of_its_steps(ranged):
    phases = {part["phase"]: (part["gpu_ms"], part["kernels"]) for part in ranged["phases"]}
    assert ranged["steps"] == 2
    assert phases == {
        "forward": (pytest.approx(0.1250715), 70),
        "backward": (pytest.approx(1.078573), 497),
        "clip": (pytest.approx(0.043584), 30),
        "noise": (pytest.approx(0.1174395), 111),
        "optimizer": (pytest.approx(0.054095), 3),
        BETWEEN_PHASES: (pytest.approx(0.066768), 38),
    }
    assert sum(ms for ms, _ in phases.values()) == pytest.approx(ranged["gpu"]["total_ms"])
    assert sum(kernels for _, kernels in phases.values()) == ranged["kernel_total"]["calls"] == 749


def test_the_optimizers_kernels_are_those_launched_within_its_ranges(ranged):
    """The plainest reading of the same tables: which launches began within a range of that name."""
    launched = ask(
        RANGED,
        """SELECT COUNT(*), SUM(k.end - k.start) FROM CUPTI_ACTIVITY_KIND_KERNEL k
           JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId
           JOIN NVTX_EVENTS n ON r.start BETWEEN n.start AND n.end LEFT JOIN StringIds s ON s.id = n.textId
           WHERE COALESCE(n.text, s.value) = 'optimizer'""",
    )
    (count, nanoseconds) = launched[0]
    part = next(part for part in ranged["phases"] if part["phase"] == "optimizer")
    assert (count / 2, nanoseconds / 2e6) == (part["kernels"], pytest.approx(part["gpu_ms"]))


# A step made by hand


def test_gpu_time_goes_to_the_phase_that_launched_it_whatever_the_thread(step):
    figures = {phase["phase"]: (phase["gpu_ms"], phase["kernels"]) for phase in step["phases"]}
    assert figures == {
        "forward": (0.1, 1),
        "backward": (pytest.approx(0.29), 3),  # launched by autograd's thread
        "clip": (0.03, 1),  # innermost: not backward
        "optimizer": (0.03, 1),  # although it ran after the range ended
        BETWEEN_PHASES: (0.005, 0),  # a copy before any phase
    }
    assert sum(ms for ms, _ in figures.values()) == pytest.approx(step["gpu"]["total_ms"])


def test_the_hosts_own_time_in_phases_sums_to_the_step(step):
    host = {phase["phase"]: phase["cpu_ms"] for phase in step["phases"]}
    assert host == {
        "forward": 0.19,
        "backward": 0.4,
        "clip": 0.1,
        "optimizer": 0.25,
        BETWEEN_PHASES: pytest.approx(0.06),
    }
    assert sum(host.values()) == pytest.approx(1.0)


def test_idle_gaps_tell_waiting_for_the_host_from_latency_between_queued_work(step):
    gaps = [(round(gap["ms"], 6), gap["phase"], gap["before"], gap["waiting_for_host"]) for gap in step["gaps"]]
    assert gaps == [
        (0.34, "optimizer", "adam", True),
        (0.07, "backward", "gemm", True),
        (0.07, "backward", "gemm", True),
        (0.035, "forward", "gemm", True),
        (0.01, "backward", "add", False),
    ]
    assert step["gpu"]["idle_ms"] == pytest.approx(0.525)
    assert step["gpu"]["idle_waiting_for_host_ms"] == pytest.approx(0.515)
    assert step["gpu"]["span_ms"] == pytest.approx(0.98)


def test_copies_have_their_kind_and_bytes(step):
    assert step["copies"] == [{"name": "Host-to-Device", "calls": 1, "ms": 0.005, "bytes": 4096}]


def test_figures_are_of_an_average_step(tmp_path):
    export = Export(tmp_path / "two.sqlite")
    for begin in (0, 1000):
        export.range("step", begin, begin + 900)
        export.range("forward", begin, begin + 500)
        export.launch(begin + 10, begin + 100, begin + 300)
    summary = summarise_timeline(read_timeline(export.write()))
    assert summary["steps"] == 2
    assert summary["kernel_total"] == {"calls": 1, "ms": 200e-6}
    forward = summary["phases"][0]
    assert (forward["phase"], forward["gpu_ms"], forward["kernels"]) == ("forward", 200e-6, 1)


def test_a_range_of_that_name_on_a_thread_that_runs_no_step_is_not_a_phase(tmp_path):
    export = Export(tmp_path / "recomputed.sqlite")
    export.range("step", 0, 1000)
    export.range("backward", 100, 900)
    export.range("forward", 200, 800, thread=AUTOGRAD)  # a checkpointed layer runs its forward again
    export.launch(300, 400, 500, thread=AUTOGRAD)
    (backward, between) = summarise_timeline(read_timeline(export.write()))["phases"]
    assert (backward["phase"], backward["kernels"]) == ("backward", 1)
    assert between["kernels"] == 0


@pytest.mark.parametrize("seed", range(20))
def test_phases_and_idle_time_agree_with_brute_force(tmp_path, seed):
    """Every activity against every range; every nanosecond busy or not."""
    dice = random.Random(seed)
    export = Export(tmp_path / "random.sqlite")
    ranges = [("step", 0, 400)]
    moment = 0
    while moment < 350:
        outer = (dice.choice(PHASES), moment + dice.randint(1, 9), moment + dice.randint(20, 60))
        ranges.append(outer)
        if dice.random() < 0.6:
            ranges.append((dice.choice(PHASES), outer[1] + 3, outer[2] - 3))
        moment = outer[2]
    for name, start, end in dice.sample(ranges, len(ranges)):
        export.range(name, start, end, by_id=dice.random() < 0.5)
    activities = []
    for _ in range(30):
        launched, length = dice.randint(0, 420), dice.randint(1, 15)
        begins = launched + dice.randint(1, 50)
        activities.append((launched, begins, begins + length))
        export.launch(*activities[-1], thread=dice.choice((MAIN, AUTOGRAD)))
    summary = summarise_timeline(read_timeline(export.write()))

    expected = dict.fromkeys((*PHASES, BETWEEN_PHASES), 0)
    for launched, begins, ends in activities:
        around = [r for r in ranges[1:] if r[1] <= launched <= r[2]]
        phase = min(around, key=lambda r: r[2] - r[1])[0] if around else BETWEEN_PHASES
        expected[phase] += ends - begins
    seen = {phase["phase"]: round(phase["gpu_ms"] * 1e6) for phase in summary["phases"]}
    assert {**dict.fromkeys(expected, 0), **seen} == expected
    busy = {ns for _, begins, ends in activities for ns in range(begins, ends)}
    assert round(summary["gpu"]["busy_ms"] * 1e6) == len(busy)
    assert round(summary["gpu"]["idle_ms"] * 1e6) == max(busy) + 1 - min(busy) - len(busy)


# Files that are no captures


def test_a_file_cut_short_is_a_sentence(tmp_path):
    for length in (0, 100, 5000, 50_000):
        cut = tmp_path / f"{length}.sqlite"
        cut.write_bytes(REAL.read_bytes()[:length])
        with pytest.raises(UnreadableCapture, match=r"Export it again|no export of Nsight Systems"):
            read_timeline(cut)


def test_a_file_that_is_no_export_is_a_sentence(tmp_path):
    text = tmp_path / "notes.sqlite"
    text.write_text("these are notes " * 100)
    with pytest.raises(UnreadableCapture, match="cannot be read as SQLite"):
        read_timeline(text)
    other = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE recipes (name TEXT)")
    with pytest.raises(UnreadableCapture, match="no table StringIds"):
        read_timeline(other)
    with pytest.raises(UnreadableCapture, match="is not there"):
        read_timeline(tmp_path / "nothing.sqlite")


def test_an_empty_capture_is_a_sentence(tmp_path):
    with pytest.raises(UnreadableCapture, match="holds no GPU work"):
        read_timeline(Export(tmp_path / "empty.sqlite").write())


@pytest.mark.parametrize(("table", "lost"), [("NVTX_EVENTS", "phases"), ("CUPTI_ACTIVITY_KIND_MEMCPY", "copies")])
def test_a_table_that_is_missing_costs_only_its_own_figures(tmp_path, table, lost):
    path = a_step(tmp_path / "step.sqlite").write()
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"DROP TABLE IF EXISTS {table}")
    summary = summarise_timeline(read_timeline(path))
    assert summary[lost] == []
    assert summary["kernel_total"]["calls"] == 6


def test_without_calls_nothing_can_be_given_to_a_phase(tmp_path):
    path = a_step(tmp_path / "step.sqlite").write()
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME")
    summary = summarise_timeline(read_timeline(path))
    gpu = {phase["phase"]: phase["gpu_ms"] for phase in summary["phases"]}
    assert gpu[BETWEEN_PHASES] == pytest.approx(summary["gpu"]["total_ms"])
    assert summary["gpu"]["launch_to_start_us"] is None


def test_tables_of_an_unknown_version_are_a_sentence(tmp_path):
    path = a_step(tmp_path / "step.sqlite").write()
    with closing(sqlite3.connect(path)) as database:
        database.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME COLUMN demangledName TO nameOfTheFuture")
    with pytest.raises(UnreadableCapture, match="version of nsys whose tables dpscope does not know"):
        read_timeline(path)


def test_reading_leaves_no_file_behind(tmp_path):
    path = a_step(tmp_path / "step.sqlite").write()
    path.chmod(0o400)
    read_timeline(path)
    assert list(tmp_path.iterdir()) == [path]


def test_summaries_are_of_the_shape_that_result_files_have(real, step):
    assert [find_mismatch(json.loads(json.dumps(each)), NsysPayload) for each in (real, step)] == [None, None]
